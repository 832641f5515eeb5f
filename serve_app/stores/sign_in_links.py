"""One-time links to the console: random tokens that sign in, or set a new password, once; Redis holds their digests."""

import hashlib
import secrets
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.stores.redis_keys import redis_key

LINK_LIFE = timedelta(hours=24)


class LinkPurpose(StrEnum):
    """What a link is for."""

    SIGN_IN = "sign_in"
    NEW_PASSWORD = "new_password"


class SignInLink(NamedTuple):
    """Whom a link signs in, and what for."""

    account_id: str
    purpose: LinkPurpose


class SignInLinks:
    """Links that an operator gives to people, and `atelier up` prints for its demo account."""

    def __init__(self, redis: Redis, family: str = "sign_in_link") -> None:
        """Links of two families of Redis keys are not taken for each other."""
        self._redis = cast(Any, redis)
        self._family = family

    async def create(self, account_id: str, purpose: LinkPurpose, *, life: timedelta = LINK_LIFE) -> str:
        """Return the token of a new link: 256 random bits, for the link's path after `/console/links/`."""
        token = secrets.token_urlsafe(32)
        await self._redis.set(self._key(token), f"{purpose}:{account_id}", ex=life)
        return token

    async def get(self, token: str) -> SignInLink | None:
        """Return the link without using it; None when it was used or is too old."""
        return _read(await self._redis.get(self._key(token)))

    async def use(self, token: str) -> SignInLink | None:
        """Return the link, for the only time."""
        return _read(await self._redis.getdel(self._key(token)))

    def _key(self, token: str) -> str:
        return redis_key(self._family, hashlib.sha256(token.encode(errors="replace")).hexdigest())


def _read(value: str | None) -> SignInLink | None:
    if value is None:
        return None
    purpose, _, account_id = value.partition(":")
    return SignInLink(account_id, LinkPurpose(purpose))
