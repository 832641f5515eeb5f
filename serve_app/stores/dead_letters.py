"""Dead letters: jobs that failed for good."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.domain.durations import epoch_ms
from serve_app.domain.jobs import Job
from serve_app.stores.job_history import Position
from serve_app.stores.job_reader import find_jobs
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script

LOOKED_AT_ONCE, CALLS = 1_000, 4
"""Jobs that one call of `list_dead.lua` looks at, about 3 ms, and calls of one page."""

Jobs = list[Job]  # `DeadLetters.list` hides the built-in name inside the class


class DeadPage(NamedTuple):
    """Failed jobs of one page, after which position the next begins, and how many failed for each code."""

    jobs: Jobs
    next: Position | None
    counts: Mapping[str, int]


class DeadLetters:
    """Failed jobs, for operators. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)
        self._requeue = Script(redis, "requeue_dead", rewrite)
        self._list_dead = Script(redis, "list_dead", rewrite)

    async def list(self, limit: int = 50) -> Jobs:
        """List failed jobs, the newest first."""
        return await find_jobs(self._redis, await self._redis.zrevrange(redis_key("dead"), 0, limit - 1))

    async def page(
        self,
        *,
        account: str = "",
        code: str = "",
        since: datetime | None = None,
        after: Position | None = None,
        limit: int,
    ) -> DeadPage:
        """List the dead letters of an account and a code since a time, newest first.

        `Position` has the time of failing. The counts are of the newest `LOOKED_AT_ONCE` of that time. A page of few
        may be short and yet have a next one: it is of `CALLS` × `LOOKED_AT_ONCE` jobs.
        """
        found, place, counts = list[Position](), after, dict[str, int]()
        for _ in range(CALLS):
            counted, rows, last = await self._list_dead(
                account=account,
                code=code,
                since=None if since is None else epoch_ms(since),
                after_ms=None if place is None else place.accepted_ms,
                after_id=None if place is None else place.job_id,
                limit=limit + 1 - len(found),
                most=LOOKED_AT_ONCE,
            )
            counts = {name: int(number) for name, number in zip(counted[::2], counted[1::2], strict=True)}
            found += [Position(int(ms), job_id) for job_id, ms in rows]
            place = Position(int(last[1]), last[0]) if last else None
            if place is None or len(found) > limit:
                break
        jobs = await find_jobs(self._redis, [each.job_id for each in found[:limit]])
        return DeadPage(jobs, found[limit - 1] if len(found) > limit else place, counts)

    async def requeue(self, job_id: str) -> bool:
        """Queue a failed job again with all its attempts; False when it has not failed."""
        return bool(await self._requeue(job_id=job_id))

    async def drop(self, job_id: str) -> bool:
        """Take a job off the list; its record stays as it is. False when it is not on the list."""
        return bool(await self._redis.zrem(redis_key("dead"), job_id))
