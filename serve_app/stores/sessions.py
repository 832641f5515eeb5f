"""Console sessions: random tokens, kept as digests, that end when idle or old."""

import hashlib
import secrets
from datetime import timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.settings import Settings
from serve_app.stores.redis import Script, key

IDLE_LIFE = timedelta(minutes=30)
ABSOLUTE_LIFE = timedelta(hours=12)


class SessionStore:
    """Who is signed in to the console. Redis never holds a token, only its SHA-256."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = cast(Any, redis)
        self._get = Script(redis, "session")

    async def create(self, account_id: str) -> str:
        """A new token of 256 random bits."""
        token = secrets.token_urlsafe(32)
        digest = _digest(token)
        pipeline = self._redis.pipeline()
        pipeline.hset(key("session", digest), "account", account_id)
        pipeline.expire(key("session", digest), IDLE_LIFE)
        pipeline.hset(key("session", digest), "ends", await self._now_ms() + _ms(ABSOLUTE_LIFE))
        pipeline.sadd(key("sessions", account_id), digest)
        pipeline.expire(key("sessions", account_id), ABSOLUTE_LIFE)
        await pipeline.execute()
        return token

    async def get(self, token: str) -> str | None:
        """The account of a live session, which stays alive for another half hour; None when it has ended."""
        return await self._get(_digest(token), _ms(IDLE_LIFE)) or None

    async def revoke(self, token: str) -> None:
        digest = _digest(token)
        account_id = await self._redis.hget(key("session", digest), "account")
        await self._redis.delete(key("session", digest))
        if account_id:
            await self._redis.srem(key("sessions", account_id), digest)

    async def revoke_all(self, account_id: str) -> int:
        """Sign the account out everywhere; the number of sessions that ended."""
        digests: set[str] = await self._redis.smembers(key("sessions", account_id))
        if not digests:
            return 0
        ended = await self._redis.delete(*(key("session", digest) for digest in digests))
        await self._redis.srem(key("sessions", account_id), *digests)
        return ended

    async def _now_ms(self) -> int:
        seconds, micros = await self._redis.time()
        return seconds * 1000 + micros // 1000


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
