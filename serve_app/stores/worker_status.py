"""Stores whether workers live and can start."""

from datetime import timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.durations import milliseconds
from serve_app.domain.jobs import JobKind
from serve_app.stores.job_queue import WORKER_LIFE
from serve_app.stores.redis_keys import redis_key

FAILURE_LIFE = timedelta(hours=1)
"""Far longer than Serve waits before it starts a replica again: a worker that cannot start renews its failure."""
MAX_REASON = 300


class WorkerStatus:
    """Stores when the workers of each kind were last seen, and why one could not start.

    Every method may raise `StoreUnavailable`.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def is_any_alive(self, kind: JobKind) -> bool:
        """Whether a worker has asked for jobs or worked on one within `WORKER_LIFE`."""
        seconds, micros = await self._redis.time()
        since = seconds * 1000 + micros // 1000 - milliseconds(WORKER_LIFE)
        return bool(await self._redis.zcount(redis_key("workers", kind), since, "+inf"))

    async def note_start(self, kind: JobKind, took: timedelta) -> None:
        """Record how long a worker took to start, and clear the last failure."""
        await self._redis.delete(redis_key("start_failure", kind))
        await self._redis.hset(redis_key("load", kind), "start_seconds", took.total_seconds())

    async def note_failure(self, kind: JobKind, reason: str) -> None:
        """Record why a worker could not start."""
        await self._redis.set(redis_key("start_failure", kind), reason[:MAX_REASON], px=FAILURE_LIFE)

    async def failure(self, kind: JobKind) -> str | None:
        """Return why the last worker that tried to start could not.

        None when none has failed since the last that could.
        """
        return await self._redis.get(redis_key("start_failure", kind))
