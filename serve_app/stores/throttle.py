"""Limits on attempts: fixed windows in Redis, shared by all replicas."""

import hashlib
import time
from dataclasses import dataclass
from datetime import timedelta

from limits import RateLimitItemPerSecond
from limits.aio.storage import RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter
from redis.asyncio import Redis

from serve_app.stores.redis import redis_errors
from serve_app.stores.redis_keys import redis_key


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `tries` of `what` in `per`, from the first try."""

    what: str
    tries: int
    per: timedelta


class Throttle:
    """Counts tries by source. Redis holds only digests of the source."""

    def __init__(self, redis: Redis) -> None:
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=redis_key("throttle"),
            connection_pool=redis.connection_pool,  # pyright: ignore[reportArgumentType] — its own documented option
        )
        self._windows = FixedWindowRateLimiter(storage)

    async def hit(self, limit: Limit, *source: str) -> float:
        """Count one try; return 0 if it is allowed, else the seconds until one is. Raises `StoreUnavailable`."""
        item, name = _item(limit), _digest(source)
        with redis_errors():
            if await self._windows.hit(item, name):
                return 0.0
            window = await self._windows.get_window_stats(item, name)
        return max(1.0, window.reset_time - time.time())

    async def reset(self, limit: Limit, *source: str) -> None:
        """Reset the count of a source."""
        with redis_errors():
            await self._windows.clear(_item(limit), _digest(source))


def _item(limit: Limit) -> RateLimitItemPerSecond:
    seconds = max(1, round(limit.per.total_seconds()))
    return RateLimitItemPerSecond(limit.tries, seconds, namespace=limit.what)


def _digest(who: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(who).encode(errors="replace")).hexdigest()[:32]
