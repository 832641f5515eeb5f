"""A lock that expires by itself, so that one process sweeps per interval."""

from datetime import timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.stores.redis_keys import redis_key


class SweepLock:
    """Held by the process that sweeps the storage. May raise `StoreUnavailable`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def acquire(self, every: timedelta) -> bool:
        """Return True to one caller per interval."""
        return bool(await self._redis.set(redis_key("sweep_lock"), "1", nx=True, px=every))
