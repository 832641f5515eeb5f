"""Compacts the records of completed jobs after a while, and restores them before a deletion."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.domain.errors import UnreadableRecord
from serve_app.stores.compact_form import is_packed, pack, packed_parts, short_digest, unpack
from serve_app.stores.records import pairs
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script

log = logging.getLogger(__name__)

BATCH = 100
SCANNED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Migration:
    """A change of the records in Redis; `applied_at` is None until it was applied."""

    name: str
    summary: str
    applied_at: datetime | None


class Compaction:
    """Compacts records and applies migrations. Any number of processes may, also beside a deletion."""

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._due = Script(redis, "due_jobs", rewrite)
        self._compact = Script(redis, "compact_job", rewrite)
        self._expand = Script(redis, "expand_job", rewrite)
        self._migrations: Mapping[str, tuple[str, Callable[[], Awaitable[None]]]] = {
            "list-uncompacted": ("list the completed jobs of earlier versions for compaction", self._list_uncompacted),
        }
        """By name, the oldest first: a sentence, and the work, which may be repeated."""

    async def compact(self, age: timedelta) -> int:
        """Compact the completed jobs that ended at least that long ago; return how many."""
        done = 0
        while rows := await self._due(age_ms=milliseconds(age), limit=BATCH):
            for job_id, flat in rows:
                done += await self._compact_one(job_id, pairs(flat))
            if len(rows) < BATCH:
                break
        return done

    async def expand(self, job_id: str, fields: Mapping[str, str]) -> Mapping[str, str]:
        """Make a compact record whole; return its fields. Raises `UnreadableRecord`."""
        whole, parts = unpack(job_id, fields), packed_parts(fields)
        cells: list[str | int] = [cell for name, text in whole.items() for cell in (name, text)]
        await self._expand(job_id=job_id, parts=len(parts), first=parts[0], fields=cells)
        return whole

    async def migrations(self) -> list[Migration]:
        applied: dict[str, str] = await self._redis.hgetall(redis_key("migrations"))
        return [
            Migration(name, summary, from_epoch_ms(applied[name]) if name in applied else None)
            for name, (summary, _) in self._migrations.items()
        ]

    async def apply_migrations(self, *, again: bool = False) -> list[str]:
        """Apply the migrations not yet applied, or with `again` all; return their names."""
        names = [each.name for each in await self.migrations() if again or each.applied_at is None]
        for name in names:
            await self._migrations[name][1]()
            seconds, micros = await self._redis.time()
            await self._redis.hset(redis_key("migrations"), name, seconds * 1000 + micros // 1000)
        return names

    async def _compact_one(self, job_id: str, fields: Mapping[str, str]) -> int:
        images, parts = fields.get("images", ""), list[str | int]()
        if fields and not is_packed(fields):
            try:
                parts += pack(job_id, fields)
            except UnreadableRecord as error:
                log.warning("job %s: its record stays as it is: %s", job_id, error.message)
                await self._redis.zrem(redis_key("uncompacted"), job_id)
                return 0
        return await self._compact(
            job_id=job_id,
            images=images,
            adapter_digest=short_digest(fields.get("adapter", "")),
            key_digest=short_digest(fields.get("key", "")),
            parts=parts,
        )

    async def _list_uncompacted(self) -> None:
        names: list[str] = []
        async for name in self._redis.scan_iter(match=redis_key("job", "*"), count=SCANNED_AT_ONCE):
            names.append(name)
            if len(names) >= SCANNED_AT_ONCE:
                await self._list(names)
                names = []
        await self._list(names)

    async def _list(self, names: list[str]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(name, "state", "finished", "0")
        rows = await pipeline.execute() if names else []
        ended = {
            name.removeprefix(redis_key("job", "")): int(finished)
            for name, (state, finished, packed) in zip(names, rows, strict=True)
            if state == "completed" and finished and packed is None
        }
        if ended:
            await self._redis.zadd(redis_key("uncompacted"), ended, nx=True)
