"""Sessions of operators in the browser: shorter than those of accounts, and kept apart from them."""

import hashlib
import secrets
from datetime import timedelta

from serve_app.domain.durations import milliseconds
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

IDLE_LIFE = timedelta(minutes=15)
ABSOLUTE_LIFE = timedelta(hours=8)


class OperatorSessions:
    """Sessions in Redis, which never holds a token, only its SHA-256."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._get = Script(redis, "accounts/operator_session")

    async def create(self, name: str, *, credential_version: str) -> str:
        """Open a session and return its token, which has 256 random bits.

        `credential_version` is that of the password or link that was shown: when it is no longer the operator's, the
        session is dead from the beginning.
        """
        token = secrets.token_urlsafe(32)
        digest = _digest(token)
        ends = await self._now_ms() + milliseconds(ABSOLUTE_LIFE)
        pipeline = self._redis.pipeline()
        session = {"operator": name, "ends": ends, "credential_version": credential_version}
        pipeline.hset(redis_key("operator_session", digest), mapping=session)
        pipeline.expire(redis_key("operator_session", digest), IDLE_LIFE)
        pipeline.sadd(redis_key("operator_sessions", name), digest)
        pipeline.expire(redis_key("operator_sessions", name), ABSOLUTE_LIFE)
        await pipeline.execute()
        return token

    async def get(self, token: str, *, extends: bool = True) -> str | None:
        """Return the operator's name; None when the session has ended.

        With `extends`, its idle time starts again.
        """
        name: str = await self._get(token_digest=_digest(token), idle_ms=milliseconds(IDLE_LIFE), extends=extends)
        return name or None

    async def revoke(self, token: str) -> None:
        digest = _digest(token)
        name = await self._redis.hget(redis_key("operator_session", digest), "operator")
        await self._redis.delete(redis_key("operator_session", digest))
        if name:
            await self._redis.srem(redis_key("operator_sessions", name), digest)

    async def revoke_all(self, name: str) -> int:
        """End every session of the operator; return how many."""
        digests = await self._redis.smembers(redis_key("operator_sessions", name))
        if not digests:
            return 0
        ended = await self._redis.delete(*(redis_key("operator_session", digest) for digest in digests))
        await self._redis.srem(redis_key("operator_sessions", name), *digests)
        return ended

    async def _now_ms(self) -> int:
        seconds, micros = await self._redis.time()
        return seconds * 1000 + micros // 1000


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
