"""Tells which adapters the latest jobs used, and how a worker's start goes on, how long it took or why it failed."""

import random
from datetime import timedelta

from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Rewrite, Script

_LARGEST_DRAW = 2**31 - 1


class RecentAdapters:
    """Samples adapters by demand, and says who holds one. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, *, rewrite: Rewrite | None = None) -> None:
        self._sample = Script(redis, "jobs/recent_adapters", rewrite, writes=False)
        self._add_owner = Script(redis, "jobs/add_owner", rewrite)

    async def sample(self, pool: str, count: int) -> list[tuple[str, str]]:
        """Return at most `count` LoRA ids of the latest completed jobs, a popular one more likely.

        Each comes with the base model that it was drawn on; '' is its own.
        """
        draws: list[str | int] = [random.randint(0, _LARGEST_DRAW) for _ in range(count)]
        drawn: list[str] = await self._sample(pool=pool, draws=draws)
        return [
            (lora_id, base_model) for lora_id, _, base_model in (each.partition(" ") for each in dict.fromkeys(drawn))
        ]

    async def add_owner(self, pool: str, weights: str, worker: str) -> None:
        """Remember that the worker holds the weights of a LoRA: its jobs are left to it for a moment."""
        await self._add_owner(pool=pool, weights=weights, worker=worker)


FAILURE_LIFE = timedelta(hours=1)
"""A failure to start is told for this long. Serve starts the replica again far sooner, which renews the failure."""
STARTING_LIFE = timedelta(seconds=15)
"""A start's progress is told for this long after its last report. A worker that starts reports far more often."""
MAX_REASON = 400


class WorkerStatus:
    """Stores by pool the progress of a worker that starts, how long a start took, and why one failed.

    Every method may raise `StoreUnavailable`.
    """

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def note_start(self, pool: str, took: timedelta) -> None:
        """Record how long a worker took to start, and clear the last failure."""
        await self._redis.delete(redis_key("start_failure", pool))
        await self._redis.hset(redis_key("load", pool), "start_seconds", took.total_seconds())

    async def note_progress(self, pool: str, progress: str) -> None:
        await self._redis.set(redis_key("starting", pool), progress[:MAX_REASON], px=STARTING_LIFE)

    async def starting(self, pool: str) -> str | None:
        """Return the progress of a worker that starts, or has just started; None where none reports any."""
        return await self._redis.get(redis_key("starting", pool)) or None

    async def note_failure(self, pool: str, reason: str) -> None:
        await self._redis.set(redis_key("start_failure", pool), reason[:MAX_REASON], px=FAILURE_LIFE)

    async def failure(self, pool: str) -> str | None:
        """Return why the last worker to start failed; None when it did not."""
        return await self._redis.get(redis_key("start_failure", pool))
