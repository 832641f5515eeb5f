"""Console sessions: random tokens, stored as digests.

A session ends when idle or old, or with the password it was opened with.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from serve_app.domain.durations import epoch_ms, from_epoch_ms, milliseconds
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

IDLE_LIFE = timedelta(minutes=30)
ABSOLUTE_LIFE = timedelta(hours=12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A live session.

    `id` is the digest of its token; what an older version did not store is None or empty.
    """

    id: str
    user_id: str
    opened_at: datetime | None
    seen_at: datetime | None
    address: str
    browser: str


class Opened(NamedTuple):
    """The holder of a live session: the account, and an invited user's id, name and role.

    The last three are empty for the account's own user.
    """

    account_id: str
    user_id: str
    name: str
    role: str


class SessionStore:
    """Sessions in Redis, which never holds a token, only its SHA-256."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._open = Script(redis, "accounts/open_session")
        self._get = Script(redis, "accounts/session")
        self._list = Script(redis, "accounts/list_sessions")

    async def create(
        self, account_id: str, *, user_id: str = "", credential_version: str = "", browser: str = "", address: str = ""
    ) -> str:
        """Open a session and return its token, which has 256 random bits.

        `credential_version` is that of the password or link that was shown: when it is no longer the user's, the
        session is dead from the beginning.
        """
        token = secrets.token_urlsafe(32)
        await self._open(
            token_digest=digest_of(token),
            account=account_id,
            user=user_id,
            credential_version=credential_version,
            browser=browser,
            address=address,
            idle_ms=milliseconds(IDLE_LIFE),
            life_ms=milliseconds(ABSOLUTE_LIFE),
        )
        return token

    async def get(self, token: str) -> Opened | None:
        """Return a live session's holder and extend it by half an hour; None when it has ended."""
        row = await self._get(token_digest=digest_of(token), idle_ms=milliseconds(IDLE_LIFE))
        return Opened(*row) if row else None

    async def list(self, account_id: str, *, user_id: str | None = None) -> Sequence[Session]:
        """The live sessions of an account or of one of its users ('' for its own), the one seen last first."""
        rows: Sequence[Sequence[str]] = await self._list(account=account_id)
        found = [
            Session(
                id=digest, user_id=user, opened_at=_time(opened), seen_at=_time(seen), address=address, browser=browser
            )
            for digest, user, opened, seen, address, browser in rows
            if user_id in (None, user)
        ]
        return sorted(found, key=lambda each: epoch_ms(each.seen_at) if each.seen_at else 0, reverse=True)

    async def revoke(self, token: str) -> None:
        digest = digest_of(token)
        account_id = await self._redis.hget(redis_key("session", digest), "account")
        if account_id:
            await self.end(account_id, digest)

    async def end(self, account_id: str, session_id: str) -> bool:
        """End a session of the account; False when it has none of this id."""
        if not await self._redis.srem(redis_key("sessions", account_id), session_id):
            return False
        await self._redis.delete(redis_key("session", session_id))
        return True

    async def revoke_all(self, account_id: str, *, user_id: str | None = None, but: str = "") -> int:
        """End every session of the account or of one of its users; return how many.

        The session of the token `but` stays.
        """
        found, kept = await self.list(account_id, user_id=user_id), digest_of(but)
        return sum([await self.end(account_id, each.id) for each in found if each.id != kept])


def digest_of(token: str) -> str:
    """The id of a token's session."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _time(text: str) -> datetime | None:
    return from_epoch_ms(text) if text else None
