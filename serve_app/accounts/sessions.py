"""Sessions in the browser: random tokens, stored as digests.

A session ends when it is idle or old, or with the password that it was opened with.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, in_parts
from serve_app.store.script import Script


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRealm:
    """Who signs in, and for how long. A session or link of one realm opens nothing in the other."""

    holders: str
    """The family of Redis keys of those who sign in."""
    prefix: str
    """The names of the realm's sessions and links in Redis begin with this."""
    idle_life: timedelta
    """A session ends when it is not used for this long."""
    life: timedelta
    """A session ends at this age, however much it is used."""

    def holder(self, holder_id: str, user_id: str = "") -> str:
        """Name who signs in as the scripts do: `account:ID`, `account:ID:USER` or `operator:NAME`."""
        return ":".join(filter(None, (self.holders, holder_id, user_id)))


LISTED_AT_ONCE = 150
"""One call of the script looks at this many sessions."""
CUSTOMERS = SessionRealm(holders="account", prefix="", idle_life=timedelta(minutes=30), life=timedelta(hours=12))
OPERATORS = SessionRealm(
    holders="operator", prefix="operator_", idle_life=timedelta(minutes=15), life=timedelta(hours=8)
)


class Holder(NamedTuple):
    """Whose a live session or link is."""

    id: str
    """The account's id, or the operator's name."""
    user_id: str
    """The id of an invited user of the account; empty for the account's own user and for operators."""
    credential_version: str
    """It changes with the password: what was opened with another version has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A live session. `id` is the digest of its token."""

    id: str
    user_id: str
    opened_at: datetime
    seen_at: datetime
    address: str
    browser: str


class SessionStore:
    """Keeps the sessions of one realm in Redis, which never holds a token, only its SHA-256."""

    def __init__(self, redis: RedisClient, realm: SessionRealm) -> None:
        self._redis = redis
        self._realm = realm
        self._open = Script(redis, "accounts/open_session")
        self._get = Script(redis, "accounts/session")
        self._list = Script(redis, "accounts/list_sessions")

    async def create(
        self, holder_id: str, *, user_id: str = "", credential_version: str = "", browser: str = "", address: str = ""
    ) -> str:
        """Open a session of an account's user or of an operator; return its token, which has 256 random bits.

        `credential_version` is that of the password or link that was shown: when it is no longer the holder's, the
        session is dead from the beginning.
        """
        token = secrets.token_urlsafe(32)
        await self._open(
            realm=self._realm.prefix,
            token_digest=digest_of(token),
            holder=self._realm.holder(holder_id, user_id),
            id=holder_id,
            credential_version=credential_version,
            browser=browser,
            address=address,
            idle_ms=milliseconds(self._realm.idle_life),
            life_ms=milliseconds(self._realm.life),
        )
        return token

    async def get(self, token: str, *, extends: bool = True) -> Holder | None:
        """Return a live session's holder; None when it has ended. With `extends`, its idle time starts again."""
        row = await self._get(
            realm=self._realm.prefix,
            token_digest=digest_of(token),
            idle_ms=milliseconds(self._realm.idle_life),
            extends=extends,
        )
        return Holder(*row) if row else None

    async def list(self, holder_id: str, *, user_id: str | None = None) -> Sequence[Session]:
        """List the live sessions of a holder or of one of its users ('' for its own), the one seen last first."""
        digests = list(await self._redis.smembers(redis_key(f"{self._realm.prefix}sessions", holder_id)))
        rows: list[Sequence[str]] = []
        for part in in_parts(digests, LISTED_AT_ONCE):
            rows += await self._list(realm=self._realm.prefix, id=holder_id, digests=part)
        found = [
            Session(
                id=digest,
                user_id=user,
                opened_at=from_epoch_ms(opened),
                seen_at=from_epoch_ms(seen),
                address=address,
                browser=browser,
            )
            for digest, user, opened, seen, address, browser in rows
            if user_id in (None, user)
        ]
        return sorted(found, key=lambda each: each.seen_at, reverse=True)

    async def end(self, holder_id: str, session_id: str) -> bool:
        """End a session of the holder; False when it has none of this id."""
        if not await self._redis.srem(redis_key(f"{self._realm.prefix}sessions", holder_id), session_id):
            return False
        await self._redis.delete(redis_key(f"{self._realm.prefix}session", session_id))
        return True

    async def revoke_all(self, holder_id: str, *, user_id: str | None = None, but: str = "") -> int:
        """End every session of the holder or of one of its users; return how many.

        The session of the token `but` stays.
        """
        found, kept = await self.list(holder_id, user_id=user_id), digest_of(but)
        return sum([await self.end(holder_id, each.id) for each in found if each.id != kept])


def digest_of(token: str) -> str:
    """Return the id of a token's session."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
