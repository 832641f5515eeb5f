"""Refuses what makes Redis grow before it is at its `maxmemory`.

There it refuses every write that needs memory. Ending, cancelling and deleting jobs, heartbeats, signing in and the
operators' changes are such writes: the reserve is for them.
"""

import time
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from serve_app.domain.errors import StoreUnavailable

RESERVE_SHARE = 0.1
"""Of `maxmemory`. The least that we set, 256 MiB, leaves 26 MiB: more than all ingress replicas take in between two looks, and
ten times what ending 10,000 jobs needs, which is less than they needed while they waited."""
CHECK_EVERY_S = 1.0


class RedisMemory(NamedTuple):
    """Memory of Redis in bytes; a limit of 0 is none."""

    used: int
    limit: int

    @property
    def is_short(self) -> bool:
        """Return whether only the reserve is left, so that new jobs are refused."""
        return bool(self.limit) and self.used > self.limit * (1 - RESERVE_SHARE)


class MemoryReserve:
    """Reports whether Redis has more memory left than the reserve.

    It looks at most once a second, when asked; in between it answers from memory.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._checked = -CHECK_EVERY_S
        self._memory: RedisMemory | None = None

    async def check(self) -> RedisMemory | None:
        """Return the memory as last seen. Raises `StoreUnavailable` while only the reserve is left."""
        if time.monotonic() - self._checked >= CHECK_EVERY_S:
            self._checked = time.monotonic()  # whoever asks meanwhile gets the last answer
            self._memory = await self.read()
        if self._memory is not None and self._memory.is_short:
            raise StoreUnavailable(f"Redis uses {self._memory.used} of {self._memory.limit} bytes")
        return self._memory

    async def read(self) -> RedisMemory | None:
        """Return the memory as it is now; None where this user may not ask. Raises `StoreUnavailable`."""
        try:
            info: dict[str, int] = await self._redis.info("memory")
        except ResponseError:
            return None
        return RedisMemory(info["used_memory"], info.get("maxmemory", 0))
