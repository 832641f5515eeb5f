"""Statistics of the queues: the backlog, what waits, and the counters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.domain.jobs import Backlog, JobKind
from serve_app.stores.backlog import ask_backlog, backlog_from
from serve_app.stores.redis_keys import redis_key

GROUPS_READ = 500


class QueueLength(NamedTuple):
    jobs: int
    oldest_age_s: float


class QueueStats:
    """Reads numbers of all accounts' jobs. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"

    async def backlog(self, kind: JobKind) -> Backlog:
        pipeline = self._redis.pipeline(transaction=False)
        ask_backlog(pipeline, kind)
        return backlog_from(kind, await pipeline.execute())

    async def dead(self) -> int:
        """Return how many failed jobs an operator may queue again."""
        return await self._redis.zcard(redis_key("dead"))

    async def waiting(self, plans: Sequence[str]) -> Mapping[tuple[JobKind, str], QueueLength]:
        """Return the waiting jobs of each plan (`a:basic`), ready or delayed, and the age of the oldest."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        of = [(kind, plan) for kind in JobKind for plan in plans]
        for kind, plan in of:
            pipeline.zcard(redis_key("plan_age", kind, plan))
            pipeline.zrange(redis_key("plan_age", kind, plan), 0, 0, withscores=True)
        (seconds, micros), *answers = await pipeline.execute()
        now_ms = seconds * 1000 + micros // 1000
        ages = [max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0 for oldest in answers[1::2]]
        return {each: QueueLength(*row) for each, row in zip(of, zip(answers[::2], ages, strict=True), strict=True)}

    async def waiting_weights(self, kind: JobKind, *, limit: int) -> Sequence[tuple[str, int]]:
        """Return the weights for which most jobs are ready, and how many.

        Of weights that wait, the `GROUPS_READ` whose jobs are the oldest are counted.
        """
        groups: list[str] = await self._redis.zrange(redis_key("groups", kind), 0, GROUPS_READ - 1)
        pipeline = self._redis.pipeline(transaction=False)
        for group in groups:
            pipeline.zcard(redis_key("group", kind, group))
        ready: Sequence[int] = await pipeline.execute() if groups else ()
        return sorted(zip(groups, ready, strict=True), key=lambda row: -row[1])[:limit]

    async def waiting_for(self, weights: str) -> int:
        """Return how many jobs of all accounts wait for these weights, by their digest."""
        return await self._redis.zcard(redis_key("group", JobKind.GENERATION, weights))

    async def counts(self) -> Mapping[str, int]:
        """Return the jobs counted since the first: accepted, requeued, fenced, ended by state."""
        row: dict[str, str] = await self._redis.hgetall(redis_key("count"))
        return {name: int(value) for name, value in row.items()}
