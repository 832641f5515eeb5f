"""Console sessions: random tokens, stored as digests, that end when idle or old."""

import hashlib
import secrets
from datetime import timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.durations import milliseconds
from serve_app.settings import Settings
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Script

IDLE_LIFE = timedelta(minutes=30)
ABSOLUTE_LIFE = timedelta(hours=12)


class SessionStore:
    """Sessions in Redis, which never holds a token, only its SHA-256."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = cast(Any, redis)
        self._get = Script(redis, "session")

    async def create(self, account_id: str) -> str:
        """Open a session; its token has 256 random bits."""
        token = secrets.token_urlsafe(32)
        digest = _digest(token)
        pipeline = self._redis.pipeline()
        pipeline.hset(redis_key("session", digest), "account", account_id)
        pipeline.expire(redis_key("session", digest), IDLE_LIFE)
        pipeline.hset(redis_key("session", digest), "ends", await self._now_ms() + milliseconds(ABSOLUTE_LIFE))
        pipeline.sadd(redis_key("sessions", account_id), digest)
        pipeline.expire(redis_key("sessions", account_id), ABSOLUTE_LIFE)
        await pipeline.execute()
        return token

    async def get(self, token: str) -> str | None:
        """Return the account of a live session and extend it by half an hour; None when it has ended."""
        return await self._get(token_digest=_digest(token), idle_ms=milliseconds(IDLE_LIFE)) or None

    async def revoke(self, token: str) -> None:
        digest = _digest(token)
        account_id = await self._redis.hget(redis_key("session", digest), "account")
        await self._redis.delete(redis_key("session", digest))
        if account_id:
            await self._redis.srem(redis_key("sessions", account_id), digest)

    async def revoke_all(self, account_id: str) -> int:
        """End every session of the account; return how many."""
        digests: set[str] = await self._redis.smembers(redis_key("sessions", account_id))
        if not digests:
            return 0
        ended = await self._redis.delete(*(redis_key("session", digest) for digest in digests))
        await self._redis.srem(redis_key("sessions", account_id), *digests)
        return ended

    async def _now_ms(self) -> int:
        seconds, micros = await self._redis.time()
        return seconds * 1000 + micros // 1000


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
