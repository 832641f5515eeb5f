"""Reads of jobs, of the backlog and of the counters."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.domain.durations import epoch_ms
from serve_app.domain.jobs import Backlog, Job, JobKind, JobState, StoredImage
from serve_app.domain.requests import Variant
from serve_app.stores.backlog import ask_backlog, backlog_from
from serve_app.stores.compact_form import short_digest
from serve_app.stores.records import read_jobs, read_snapshot
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script

LOOKED_AT_ONCE = 200
"""Records that one call of `list_jobs.lua` looks at: under 1 ms, so that no poll waits behind a search."""
ASKED_AT_ONCE = 1_000
"""Jobs that one call of `ended.lua` is asked about."""
REMEMBERED_S, MOST_REMEMBERED = 1.0, 10_000
Names = list[str]
Jobs = list[Job]  # `JobReader.list` hides the built-in name inside the class
Positions = list["Position"]
GROUPS_READ = 500
LIST_LIMIT, LIST_STRIDE = 10_000, 200
"""How many of the newest jobs `list_all` reads, and how many at once."""


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


class QueueLength(NamedTuple):
    jobs: int
    oldest_age_s: float


class JobReader:
    """Reads jobs. Every method may raise `StoreUnavailable`.

    A read of one job raises `UnreadableRecord` when this version cannot read its record; a list leaves it out.
    """

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._read = Script(redis, "read", rewrite)
        self._ended = Script(redis, "ended", rewrite, writes=False)
        self._image_opens = Script(redis, "image_opens", rewrite)
        self._list_jobs = Script(redis, "list_jobs", rewrite)
        self._opens: dict[str, float] = {}

    async def get(self, job_id: str, *, account_id: str, variant: Variant | None = None) -> Job | None:
        """Return the job if it is the account's (and was made on `variant`), with an estimate of its end."""
        job = read_snapshot(await self._read(job_id=job_id))
        if job is None or job.account_id != account_id or variant not in (None, job.variant):
            return None
        return job

    async def find(self, job_id: str) -> Job | None:
        """Return the job of any account; for operators."""
        return read_snapshot(await self._read(job_id=job_id))

    async def list(self, account_id: str, *, limit: int = 50, before: datetime | None = None) -> Jobs:
        """List the account's jobs accepted before a time, newest first."""
        latest = "+inf" if before is None else f"({epoch_ms(before)}"
        ids = await self._redis.zrevrangebyscore(redis_key("jobs", account_id), latest, "-inf", start=0, num=limit)
        return await find_jobs(self._redis, ids)

    async def ended(self, job_ids: Names) -> Names:
        """Return which of the jobs have ended or do not exist."""
        found: Names = []
        for start in range(0, len(job_ids), ASKED_AT_ONCE):
            found += await self._ended(job_ids=job_ids[start : start + ASKED_AT_ONCE])
        return found

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
                adapter_digest=short_digest(only.lora_id),
                key_digest=short_digest(only.key_id),
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

    async def image(self, image_id: str, *, account_id: str, variant: Variant | None = None) -> StoredImage | None:
        """Return a committed image of one of the account's jobs."""
        job_id = await self._redis.get(redis_key("image", image_id))
        job = await self.get(job_id, account_id=account_id, variant=variant) if job_id else None
        if job is None:
            return None
        return next((image for image in job.images if image.image_id == image_id), None)

    async def images_open(self, job_id: str) -> bool:
        """Whether addresses of the job's images still open: it exists, and its account is not disabled.

        One round trip; a yes is remembered for a second.
        """
        now = time.monotonic()
        if self._opens.get(job_id, 0.0) > now:
            return True
        if not await self._image_opens(job_id=job_id):
            return False
        if len(self._opens) >= MOST_REMEMBERED:
            self._opens.clear()
        self._opens[job_id] = now + REMEMBERED_S
        return True

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
        groups: Names = await self._redis.zrange(redis_key("groups", kind), 0, GROUPS_READ - 1)
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

    async def find_many(self, job_ids: Sequence[str]) -> Mapping[str, Job]:
        """Return the jobs that exist, by id; without estimates."""
        return {job.id: job for job in await find_jobs(self._redis, job_ids)}


async def find_jobs(redis: Any, ids: Sequence[str]) -> Jobs:
    """Return the jobs that exist, in the order of the ids; without estimates."""
    if not ids:
        return []
    pipeline = redis.pipeline(transaction=False)
    for job_id in ids:
        pipeline.hgetall(redis_key("job", job_id))
    rows: list[dict[str, str]] = await pipeline.execute()
    return read_jobs({job_id: row for job_id, row in zip(ids, rows, strict=True) if row})
