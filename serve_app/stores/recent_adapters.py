"""The adapters of the latest completed jobs, for workers that prefetch."""

import random

from redis.asyncio import Redis

from serve_app.domain.jobs import JobKind
from serve_app.stores.script import Rewrite, Script

_LARGEST_DRAW = 2**31 - 1


class RecentAdapters:
    """Samples adapters by demand, and says who holds one. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._sample = Script(redis, "recent_adapters", rewrite, writes=False)
        self._add_owner = Script(redis, "add_owner", rewrite)

    async def sample(self, kind: JobKind, count: int) -> list[str]:
        """Return at most `count` LoRA ids of the latest completed jobs, a popular one more likely."""
        draws: list[str | int] = [random.randint(0, _LARGEST_DRAW) for _ in range(count)]
        drawn: list[str] = await self._sample(kind=kind, draws=draws)
        return list(dict.fromkeys(drawn))

    async def add_owner(self, kind: JobKind, group: str, worker: str) -> None:
        """Remember that the worker holds the group's adapter: its jobs are left to it for a moment."""
        await self._add_owner(kind=kind, group=group, worker=worker)
