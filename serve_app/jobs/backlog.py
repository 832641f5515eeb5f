"""Estimates when a job ends, and reads how much work waits: for callers, metrics, pages and autoscaling."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from serve_app.domain.durations import MILLI, from_epoch_ms
from serve_app.domain.jobs import DEFAULT_GROUP, Backlog, JobKind, JobState, kind_of_pool, pool_of
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, connect_sync
from serve_app.store.redis_copy import ask_copy_age, copy_age_from

DEFAULT_SECONDS_PER_UNIT: Mapping[JobKind, float] = {JobKind.GENERATION: 0.5, JobKind.UPSCALE: 0.5}
"""A work unit (a megapixel-step with guidance; an output megapixel) is taken to need this many seconds until a job has
been measured."""
SOONEST = timedelta(seconds=1)
"""An estimate is never in the past, nor promises less than this."""


class QueuePosition(NamedTuple):
    """What an estimate needs, as `snapshot` in `record.lua` answers it: of a job that does not wait, the time alone.

    Work is in thousandths of a unit. `place` is the job's place in its account's queue (-1: in none), `accounts` are
    those with waiting jobs, `start_seconds` is how long the last worker took to start; 0 is what was never measured.
    """

    now_ms: int
    workers: int = 0
    accounts: int = 0
    place: int = -1
    seconds_per_unit: float = 0.0
    ready: float = 0.0
    ready_work: float = 0.0
    work: float = 0.0
    start_seconds: float = 0.0

    @property
    def now(self) -> datetime:
        return from_epoch_ms(self.now_ms)


def read_position(answer: Sequence[Any]) -> QueuePosition:
    return QueuePosition(*answer[:4], *map(float, answer[4:]))


def estimate_finish(kind: JobKind, state: JobState, fields: Mapping[str, str], position: QueuePosition) -> datetime:
    """Estimate when a job finishes: a worker's start if none is there, the work ahead, and its own rest.

    The rest of a running job is of the seconds that its claim took it to need; one that waits while nothing runs is
    expected to wait as long again as it has waited.
    """
    share_left = 1 - int(fields.get("progress", 0)) / 100
    if state is JobState.RUNNING:
        return position.now + max(SOONEST, timedelta(seconds=share_left * float(fields["charge"])))
    own = int(fields["work"])
    left, ahead = own * share_left, _work_ahead(own, position) / max(1, position.workers)
    seconds_per_unit = position.seconds_per_unit or DEFAULT_SECONDS_PER_UNIT[kind]
    starting = position.start_seconds if waits_for_worker(state, position) else 0.0
    is_stuck = state is JobState.QUEUED and position.work <= position.ready_work
    waited_ms = position.now_ms - int(fields.get("waiting_since", position.now_ms)) if is_stuck else 0
    seconds = max(starting, waited_ms / 1000) + (left + ahead) / MILLI * seconds_per_unit
    return position.now + max(SOONEST, timedelta(seconds=seconds))


def waits_for_worker(state: JobState, position: QueuePosition) -> bool:
    """Return whether a job waits while no worker is there: the deployment has scaled to none, or starts."""
    return state is JobState.QUEUED and position.workers == 0


def _work_ahead(own: int, position: QueuePosition) -> float:
    """Return half of the running work and what the fair queue serves before this job.

    The queue serves as many jobs of each waiting account as are before this one in its own account.
    """
    running = max(0, position.work - position.ready_work) / 2
    if position.place < 0 or position.ready == 0:
        return running  # a job that backs off comes back at its old place, near the front
    before = position.place * max(1, position.accounts) * position.ready_work / position.ready
    return running + min(before, max(0, position.ready_work - own))


SPEEDS = ("seconds_per_unit", "busy_seconds_per_unit")


def read_backlog(redis_url: str, pool: str) -> Backlog:
    """Read the backlog through a blocking client. Raises `StoreUnavailable`."""
    with connect_sync(redis_url) as client:
        pipeline = client.pipeline(transaction=False)
        ask_backlog(pipeline, pool)
        return backlog_from(pool, pipeline.execute())


def ask_backlog(pipeline: Any, pool: str) -> None:
    """Add the commands whose answers `backlog_from` reads."""
    pipeline.hmget(redis_key("load", pool), "ready", "ready_work", "work", "accepted_work", *SPEEDS)
    pipeline.zcard(redis_key("lease", pool))
    pipeline.zcard(redis_key("delay", pool))
    pipeline.zrange(redis_key("age", pool), 0, 0, withscores=True)
    pipeline.time()


def backlog_from(pool: str, answer: Sequence[Any]) -> Backlog:
    (ready, ready_work, work, accepted, speed, busy_speed), leased, delayed, oldest, (seconds, micros) = answer
    seconds_per_unit = float(speed) if speed else DEFAULT_SECONDS_PER_UNIT[kind_of_pool(pool)]
    return Backlog(
        ready=int(ready or 0),
        leased=leased,
        delayed=delayed,
        ready_seconds=int(ready_work or 0) / MILLI * seconds_per_unit,
        seconds=int(work or 0) / MILLI * seconds_per_unit,
        oldest_age_s=_age_s(oldest, seconds, micros),
        accepted=int(accepted or 0) / MILLI,
        busy_seconds_per_unit=float(busy_speed) if busy_speed else seconds_per_unit,
    )


def _age_s(oldest: Sequence[tuple[str, float]], seconds: int, micros: int) -> float:
    """Return how long the first of an index by time has waited at the server's time; 0 for an empty index."""
    return max(0.0, seconds + micros / 1e6 - oldest[0][1] / 1000) if oldest else 0.0


class QueueLength(NamedTuple):
    jobs: int
    oldest_age_s: float


class QueueStats:
    """Reads numbers of all accounts' jobs. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def backlog(self, pool: str) -> Backlog:
        pipeline = self._redis.pipeline(transaction=False)
        ask_backlog(pipeline, pool)
        return backlog_from(pool, await pipeline.execute())

    async def dead(self) -> int:
        """Return how many failed jobs an operator may queue again."""
        return await self._redis.zcard(redis_key("dead"))

    async def copy_age(self) -> timedelta | None:
        """Return how long ago Redis was copied, or its first account made if it never was; None without accounts."""
        pipeline = self._redis.pipeline(transaction=False)
        ask_copy_age(pipeline)
        return copy_age_from(await pipeline.execute())

    async def webhooks(self) -> int:
        """Return how many deliveries of webhooks wait for their next attempt."""
        accounts: list[str] = await self._redis.zrange(redis_key("webhooks_due"), 0, -1)
        pipeline = self._redis.pipeline(transaction=False)
        for account_id in accounts:
            pipeline.zcard(redis_key("webhook_due", account_id))
        return sum(await pipeline.execute())

    async def pools(self) -> list[str]:
        """Return the names of the pools: that of the group `default`, those of other groups by name, that of upscales."""
        return [pool_of(DEFAULT_GROUP), *sorted(await self._redis.smembers(redis_key("pools"))), str(JobKind.UPSCALE)]

    async def waiting(self, plans: Sequence[str]) -> Mapping[tuple[str, str], QueueLength]:
        """Return the waiting jobs of each pool and plan (`a:basic`), ready or delayed, and the age of the oldest."""
        of = [(pool, plan) for pool in await self.pools() for plan in plans]
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for pool, plan in of:
            pipeline.zcard(redis_key("plan_age", pool, plan))
            pipeline.zrange(redis_key("plan_age", pool, plan), 0, 0, withscores=True)
        (seconds, micros), *answers = await pipeline.execute()
        ages = [_age_s(oldest, seconds, micros) for oldest in answers[1::2]]
        return {each: QueueLength(*row) for each, row in zip(of, zip(answers[::2], ages, strict=True), strict=True)}

    async def waiting_for(self, weights: Sequence[str]) -> Mapping[str, int]:
        """Return how many jobs of all accounts are ready for each of these weights, by their digests."""
        if not weights:
            return {}
        pools = await self.pools()
        pipeline = self._redis.pipeline(transaction=False)
        for digest in weights:
            for pool in pools:
                pipeline.zcard(redis_key("group", pool, digest))
        ready = iter(await pipeline.execute())
        return {digest: sum(next(ready) for _ in pools) for digest in weights}

    async def counts(self) -> Mapping[str, int]:
        """Return the jobs counted since the first: accepted, requeued, fenced, ended by state."""
        row: dict[str, str] = await self._redis.hgetall(redis_key("count"))
        return {name: int(value) for name, value in row.items()}
