"""How often something may be tried: fixed windows counted in Redis, so that all replicas count together."""

import hashlib
import time
from dataclasses import dataclass
from datetime import timedelta

from limits import RateLimitItemPerSecond
from limits.aio.storage import RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter
from redis.asyncio import Redis

from serve_app.stores.redis import key, reaching_redis


@dataclass(frozen=True, slots=True)
class Allowance:
    """At most `tries` of `what` in `per`, counted from the first."""

    what: str
    tries: int
    per: timedelta


class Throttle:
    """Counts tries by whoever makes them. Redis sees only digests of who that is."""

    def __init__(self, redis: Redis) -> None:
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=key("throttle"),
            connection_pool=redis.connection_pool,  # pyright: ignore[reportArgumentType] — its own documented option
        )
        self._windows = FixedWindowRateLimiter(storage)

    async def take(self, allowance: Allowance, *who: str) -> float:
        """Counts one try. 0 when it may go ahead, else the seconds until one may. Raises `StoreUnavailable`."""
        item, name = _item(allowance), _digest(who)
        with reaching_redis():
            if await self._windows.hit(item, name):
                return 0.0
            window = await self._windows.get_window_stats(item, name)
        return max(1.0, window.reset_time - time.time())

    async def forget(self, allowance: Allowance, *who: str) -> None:
        """Starts the count of `who` again."""
        with reaching_redis():
            await self._windows.clear(_item(allowance), _digest(who))


def _item(allowance: Allowance) -> RateLimitItemPerSecond:
    seconds = max(1, round(allowance.per.total_seconds()))
    return RateLimitItemPerSecond(allowance.tries, seconds, namespace=allowance.what)


def _digest(who: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(who).encode(errors="replace")).hexdigest()[:32]
