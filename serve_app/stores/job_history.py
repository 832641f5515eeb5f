"""Lists of jobs, newest first: an account's, page by page, and those of all accounts."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.domain.durations import epoch_ms
from serve_app.domain.errors import UnreadableRecord
from serve_app.domain.jobs import Job, JobState
from serve_app.stores.job_reader import find_jobs
from serve_app.stores.records import RECORD_VERSION, read_job, record_version
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script

LOOKED_AT_ONCE = 200
"""Records that one call of `list_jobs.lua` looks at: under 1 ms, so that no poll waits behind a search."""
LIST_LIMIT, LIST_STRIDE = 10_000, 200
"""How many of the newest jobs `list_all` reads, and how many at once."""
Jobs = list[Job]  # `JobHistory.list` hides the built-in name inside the class
Positions = list["Position"]
NO_KEY = "-"
"""In place of a key: of jobs that were asked for in the console."""


class Position(NamedTuple):
    """A job's position in its account's list; the newest is the greatest."""

    accepted_ms: int
    job_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """Which of an account's jobs to list; an empty text takes any. `since` is included, `until` is not."""

    state: JobState | None = None
    lora_id: str = ""
    key_id: str = ""
    since: datetime | None = None
    until: datetime | None = None


class JobPage(NamedTuple):
    """Jobs of one page, and after which position the next begins; None on the last.

    A page of too few jobs that has a next one ends where no more was to be looked at.
    """

    jobs: list[Job]
    next: Position | None


class NewestRecords(NamedTuple):
    """Jobs, newest first; ids of unreadable records; how many records a newer version wrote."""

    jobs: list[Job]
    unreadable: list[str]
    newer: int


class JobHistory:
    """Lists jobs; leaves out those whose record this version cannot read.

    Every method may raise `StoreUnavailable`.
    """

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._list_jobs = Script(redis, "list_jobs", rewrite)

    async def list(self, account_id: str, *, limit: int = 50, before: datetime | None = None) -> Jobs:
        """List the account's jobs accepted before a time, newest first."""
        latest = "+inf" if before is None else f"({epoch_ms(before)}"
        ids = await self._redis.zrevrangebyscore(redis_key("jobs", account_id), latest, "-inf", start=0, num=limit)
        return await find_jobs(self._redis, ids)

    async def page(
        self,
        account_id: str,
        *,
        limit: int,
        only: JobFilter | None = None,
        after: Position | None = None,
        among: int | None = None,
    ) -> JobPage:
        """List those of the account's jobs that a filter takes, newest first, after a position.

        With `among`, only about so many jobs are looked at.
        """
        only, found, place, looked = only or JobFilter(), Positions(), after, 0
        while len(found) <= limit and (among is None or looked < among):
            looked += LOOKED_AT_ONCE
            rows, last = await self._list_jobs(
                account=account_id,
                state=only.state,
                adapter=only.lora_id,
                key_id=only.key_id,
                since=None if only.since is None else epoch_ms(only.since),
                until_ms=None if only.until is None else epoch_ms(only.until),
                after_ms=None if place is None else place.accepted_ms,
                after_id=None if place is None else place.job_id,
                limit=limit + 1 - len(found),
                most=LOOKED_AT_ONCE,
            )
            found += [Position(int(ms), job_id) for job_id, ms in rows]
            place = Position(int(last[1]), last[0]) if last else None
            if place is None:
                break
        jobs = await find_jobs(self._redis, [each.job_id for each in found[:limit]])
        return JobPage(jobs, found[limit - 1] if len(found) > limit else place)

    async def list_all(self, state: JobState | None = None, limit: int = 50) -> Jobs:
        """List the newest jobs of all accounts, of one state if given, among the newest `LIST_LIMIT`."""
        found: list[Job] = []
        for start in range(0, LIST_LIMIT, LIST_STRIDE):
            ids = await self._redis.zrevrange(redis_key("recent"), start, start + LIST_STRIDE - 1)
            jobs = await find_jobs(self._redis, ids)
            found += [job for job in jobs if state is None or job.state is state]
            if len(found) >= limit or len(ids) < LIST_STRIDE:
                break
        return found[:limit]

    async def newest_records(self, limit: int) -> NewestRecords:
        """Read the newest jobs of all accounts, and tell which records cannot be read."""
        jobs, unreadable, newer = Jobs(), list[str](), 0
        for start in range(0, limit, LIST_STRIDE):
            ids = await self._redis.zrevrange(redis_key("recent"), start, min(start + LIST_STRIDE, limit) - 1)
            pipeline = self._redis.pipeline(transaction=False)
            for job_id in ids:
                pipeline.hgetall(redis_key("job", job_id))
            for job_id, fields in zip(ids, await pipeline.execute(), strict=True):
                newer += record_version(fields.get("version")) > RECORD_VERSION
                try:
                    jobs += [read_job(job_id, fields)] if fields else []
                except UnreadableRecord:
                    unreadable.append(job_id)
        return NewestRecords(jobs, unreadable, newer)
