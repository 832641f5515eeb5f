"""Reads jobs and their images by id, lists jobs newest first, and looks after dead letters (failed jobs)."""

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import Any, NamedTuple

from serve_app.domain.durations import Position, epoch_ms, milliseconds
from serve_app.domain.errors import UnreadableRecord
from serve_app.domain.jobs import Job, JobKind, JobState, StoredImage
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.jobs.records import RECORD_VERSION, read_job, read_snapshot, record_version
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, read_records
from serve_app.store.script import Argument, Rewrite, Script, pairs

ASKED_AT_ONCE = 1_000
"""One call of `changes.lua` is asked about at most this many jobs."""


class JobReader:
    """Reads jobs by their ids. Every method may raise `StoreUnavailable`.

    A read of one job raises `UnreadableRecord` when this version cannot read its record; a read of several omits it.
    """

    def __init__(self, redis: RedisClient, *, rewrite: Rewrite | None = None) -> None:
        self._redis = redis
        self._read = Script(redis, "jobs/read", rewrite)
        self._changes = Script(redis, "jobs/changes", rewrite, writes=False)

    async def get(self, job_id: str, *, account_id: str, variant: Variant | None = None) -> Job | None:
        """Return the job if it is the account's (and was made on `variant`), with an estimate of its end."""
        job = read_snapshot(await self._read(job_id=job_id))
        if job is None or job.account_id != account_id or variant not in (None, job.variant):
            return None
        return job

    async def find(self, job_id: str) -> Job | None:
        """Return the job of any account; for operators."""
        return read_snapshot(await self._read(job_id=job_id))

    async def find_many(self, job_ids: Sequence[str]) -> Mapping[str, Job]:
        """Return the jobs that exist, by id; without estimates."""
        return {job.id: job for job in await find_jobs(self._redis, job_ids)}

    async def changes(self, known: Mapping[str, str]) -> list[tuple[str, str, Sequence[str]]]:
        """Return by id the jobs that have changed since their `known` texts: the new text, and the previews' fields."""
        args, found = [text for pair in known.items() for text in pair], list[tuple[str, str, Sequence[str]]]()
        for start in range(0, len(args), 2 * ASKED_AT_ONCE):
            found += await self._changes(known=args[start : start + 2 * ASKED_AT_ONCE])
        return found

    async def image(
        self, image_id: str, *, account_id: str, variant: Variant | None = None
    ) -> tuple[Job, StoredImage] | None:
        """Return a committed image of one of the account's jobs, and the job."""
        job_id = await self._redis.get(redis_key("image", image_id))
        job = await self.get(job_id, account_id=account_id, variant=variant) if job_id else None
        if job is None:
            return None
        return next(((job, image) for image in job.images if image.image_id == image_id), None)


async def find_jobs(redis: RedisClient, ids: Sequence[str]) -> list[Job]:
    """Return the jobs that exist and that this version can read, in the order of the ids; without estimates."""
    jobs: list[Job] = []
    for job_id, fields in (await read_records(redis, ids, "job")).items():
        with suppress(UnreadableRecord):
            jobs.append(read_job(job_id, fields))
    return jobs


LOOKED_AT_ONCE = 200
"""One call of `list_jobs.lua` looks at this many records, in less than 1 ms, so that no poll waits behind a search."""
READ_AT_MOST = 1_000
"""A page with a filter that only requests can answer reads at most this many, each in about 70 µs."""
LIST_LIMIT, LIST_STRIDE = 10_000, 200
"""`list_all` reads at most the 10,000 newest jobs, 200 of them at once."""
NO_KEY = "-"
"""Jobs that were asked for in the console have this in place of a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """Which of an account's jobs to list; an empty text takes any. `since` is included, `until` is not."""

    state: JobState | None = None
    kind: JobKind | None = None
    lora_id: str = ""
    key_id: str = ""
    since: datetime | None = None
    until: datetime | None = None
    base_model: str = ""
    metadata: Set[str] = frozenset()
    """Texts that the request keeps, each as `name=value`."""


class JobPage(NamedTuple):
    """The jobs of one page, and the position after which the next page begins; None on the last.

    A page that has a next one may still be short: the search stops after a bounded number of records.
    """

    jobs: Sequence[Job]
    next: Position | None


class NewestRecords(NamedTuple):
    """The newest jobs, the ids of unreadable records, and how many records a newer version wrote."""

    jobs: list[Job]
    unreadable: list[str]
    newer: int


class JobHistory:
    """Lists jobs; leaves out those whose record this version cannot read. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._list_jobs = Script(redis, "jobs/list_jobs")

    async def list(self, account_id: str, *, limit: int = 50) -> Sequence[Job]:
        """List the account's newest jobs, the newest first."""
        return await find_jobs(self._redis, await self._redis.zrevrange(redis_key("jobs", account_id), 0, limit - 1))

    async def page(
        self,
        account_id: str,
        *,
        limit: int,
        only: JobFilter | None = None,
        after: Position | None = None,
        among: int = LIST_LIMIT,
    ) -> JobPage:
        """List those of the account's jobs that a filter takes, newest first, after a position.

        Only about `among` jobs are looked at; for what only their requests say, `READ_AT_MOST`.
        """
        only = only or JobFilter()
        args: dict[str, Argument] = {
            "account": account_id,
            "state": only.state,
            "kind": only.kind,
            "adapter": only.lora_id,
            "key_id": only.key_id,
            "since": None if only.since is None else epoch_ms(only.since),
            "until_ms": None if only.until is None else epoch_ms(only.until),
        }
        if not only.base_model and not only.metadata:
            search = PageSearch(self._list_jobs, calls=ceil(among / LOOKED_AT_ONCE), most=LOOKED_AT_ONCE)
            places, following = await search.page(limit, after, **args)
            return JobPage(await find_jobs(self._redis, [each.id for each in places]), following)
        search, following = PageSearch(self._list_jobs, calls=1, most=LOOKED_AT_ONCE), after
        found, places = list[Job](), dict[str, Position]()
        for _ in range(READ_AT_MOST // LOOKED_AT_ONCE):
            rows, following = await search.page(LOOKED_AT_ONCE, following, **args)
            places |= {each.id: each for each in rows}
            found += await self._taken(await find_jobs(self._redis, [each.id for each in rows]), only)
            if len(found) > limit:
                return JobPage(found[:limit], places[found[limit - 1].id])
            if following is None:
                break
        return JobPage(found, following)

    async def _taken(self, jobs: Sequence[Job], only: JobFilter) -> Sequence[Job]:
        """Return the jobs whose request a filter takes. Requests of A and B leave the base model to their LoRA."""
        drawn = {job.id: job.request for job in jobs if isinstance(job.request, GenerationRequest)}
        lora_ids = list({request.lora_id for request in drawn.values() if not request.base_model})
        pipeline = self._redis.pipeline(transaction=False)
        for lora_id in lora_ids if only.base_model else ():
            pipeline.hget(redis_key("lora", lora_id), "base_model")
        of_loras = dict(zip(lora_ids, await pipeline.execute(), strict=False))
        bases = {job_id: each.base_model or of_loras.get(each.lora_id) for job_id, each in drawn.items()}

        def texts(job: Job) -> Set[str]:
            return {f"{name}={value}" for name, value in job.request.metadata.items()} if job.request else set()

        rest = [job for job in jobs if only.base_model in ("", bases.get(job.id))]
        return [job for job in rest if only.metadata <= texts(job)]

    async def list_all(self, state: JobState | None = None, limit: int = 50) -> Sequence[Job]:
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
        jobs, unreadable, newer = list[Job](), list[str](), 0
        for start in range(0, limit, LIST_STRIDE):
            ids = await self._redis.zrevrange(redis_key("recent"), start, min(start + LIST_STRIDE, limit) - 1)
            for job_id, fields in (await read_records(self._redis, ids, "job")).items():
                newer += record_version(fields.get("version")) > RECORD_VERSION
                try:
                    jobs.append(read_job(job_id, fields))
                except UnreadableRecord:
                    unreadable.append(job_id)
        return NewestRecords(jobs, unreadable, newer)


@dataclass
class PageSearch:
    """Looks for a page of an index with `page.lua`: in at most `calls` calls, each of which looks at `most` records."""

    script: Script
    calls: int
    most: int
    more: Sequence[Any] = ()
    """What the script answered last besides the page."""

    async def page(
        self, limit: int, after: Position | None, **only: Argument
    ) -> tuple[Sequence[Position], Position | None]:
        """Return at most `limit` rows after a position, and where to go on; None where all were seen."""
        found, place = list[Position](), after
        for _ in range(self.calls):
            *self.more, rows, last = await self.script(
                **only,
                after_ms=None if place is None else place.ms,
                after_id=None if place is None else place.id,
                limit=limit + 1 - len(found),
                most=self.most,
            )
            found += [Position(int(ms), row_id) for row_id, ms in rows]
            place = Position(int(last[1]), last[0]) if last else None
            if place is None or len(found) > limit:
                break
        return found[:limit], found[limit - 1] if len(found) > limit else place


FAILED_AT_ONCE, CALLS = 450, 9
"""One call of `list_dead.lua` looks at this many jobs, in about 2 ms, and one page takes this many calls."""


class DeadPage(NamedTuple):
    """The failed jobs of one page, the position after which the next begins, and how many failed for each code."""

    jobs: Sequence[Job]
    next: Position | None
    counts: Mapping[str, int]


class DeadLetters:
    """Failed jobs, for operators. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings, *, rewrite: Rewrite | None = None) -> None:
        self._redis = redis
        self._index_ms = milliseconds(settings.longest_record_life)
        self._requeue = Script(redis, "jobs/requeue_dead", rewrite)
        self._list_dead = Script(redis, "jobs/list_dead", rewrite)

    async def list(self, limit: int = 50) -> Sequence[Job]:
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

        A `Position` has the time of failing. The counts are of the newest `FAILED_AT_ONCE` jobs of that time. A page
        looks at `CALLS` × `FAILED_AT_ONCE` jobs at most, so that it may be short and yet have a next one.
        """
        search = PageSearch(self._list_dead, calls=CALLS, most=FAILED_AT_ONCE)
        since_ms = None if since is None else epoch_ms(since)
        places, following = await search.page(limit, after, account=account, code=code, since=since_ms)
        (counted,) = search.more
        counts = {name: int(number) for name, number in pairs(counted).items()}
        return DeadPage(await find_jobs(self._redis, [each.id for each in places]), following, counts)

    async def requeue(self, job_id: str) -> bool:
        """Queue a failed job again with all its attempts; False when it has not failed."""
        return bool(await self._requeue(job_id=job_id, index_ms=self._index_ms))

    async def drop(self, job_id: str) -> bool:
        """Take a job off the list; its record stays as it is. False when it is not on the list."""
        return bool(await self._redis.zrem(redis_key("dead"), job_id))
