"""Reads of jobs, and of their images, by id."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.jobs import Job, StoredImage
from serve_app.domain.requests import Variant
from serve_app.stores.records import read_jobs, read_snapshot
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script

ASKED_AT_ONCE = 1_000
"""Jobs that one call of `ended.lua` is asked about."""


class JobReader:
    """Reads jobs by their ids. Every method may raise `StoreUnavailable`.

    A read of one job raises `UnreadableRecord` when this version cannot read its record; of several, it is left out.
    """

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._read = Script(redis, "read", rewrite)
        self._ended = Script(redis, "ended", rewrite, writes=False)

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

    async def ended(self, job_ids: list[str]) -> list[str]:
        """Return which of the jobs have ended or do not exist."""
        found: list[str] = []
        for start in range(0, len(job_ids), ASKED_AT_ONCE):
            found += await self._ended(job_ids=job_ids[start : start + ASKED_AT_ONCE])
        return found

    async def image(self, image_id: str, *, account_id: str, variant: Variant | None = None) -> StoredImage | None:
        """Return a committed image of one of the account's jobs."""
        job_id = await self._redis.get(redis_key("image", image_id))
        job = await self.get(job_id, account_id=account_id, variant=variant) if job_id else None
        if job is None:
            return None
        return next((image for image in job.images if image.image_id == image_id), None)


async def find_jobs(redis: Any, ids: Sequence[str]) -> list[Job]:
    """Return the jobs that exist, in the order of the ids; without estimates."""
    if not ids:
        return []
    pipeline = redis.pipeline(transaction=False)
    for job_id in ids:
        pipeline.hgetall(redis_key("job", job_id))
    rows: list[dict[str, str]] = await pipeline.execute()
    return read_jobs({job_id: row for job_id, row in zip(ids, rows, strict=True) if row})
