"""One-time links to the console, random tokens that sign in or set a new password.

Redis holds their digests. A link is void as soon as the account's password is changed, or the account disabled.
"""

import hashlib
import secrets
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

from redis.asyncio import Redis

from serve_app.domain.durations import milliseconds
from serve_app.stores.script import Script

LINK_LIFE = timedelta(hours=24)


class LinkPurpose(StrEnum):
    """What a link is for."""

    SIGN_IN = "sign_in"
    NEW_PASSWORD = "new_password"


class SignInLink(NamedTuple):
    """A link: whom it signs in, and for what."""

    account_id: str
    purpose: LinkPurpose
    credential_version: str
    """For the session that it opens."""
    user_id: str = ""
    """Of an invited user of the account."""


class SignInLinks:
    """Links that an operator gives to people, and `atelier up` prints for its demo account."""

    def __init__(self, redis: Redis, family: str = "sign_in_link", holder: str = "account") -> None:
        """Store links under the family of Redis keys, whose links no other family accepts.

        `holder` is the family of those who sign in with them.
        """
        self._family, self._holder = family, holder
        self._create = Script(redis, "create_sign_in_link")
        self._get = Script(redis, "sign_in_link")

    async def create(
        self, account_id: str, purpose: LinkPurpose, *, user_id: str = "", life: timedelta = LINK_LIFE
    ) -> str:
        """Return the token of a new link: 256 random bits, for the link's path after `/console/links/`."""
        token = secrets.token_urlsafe(32)
        await self._create(
            name=self._name(token),
            purpose=purpose,
            holder=self._holder,
            id=f"{account_id}:{user_id}" if user_id else account_id,
            life_ms=milliseconds(life),
        )
        return token

    async def get(self, token: str) -> SignInLink | None:
        """Return the link without using it; None when it was used, is too old or void."""
        return _read(await self._get(name=self._name(token), holder=self._holder, use=False))

    async def use(self, token: str) -> SignInLink | None:
        """Return the link, for the only time."""
        return _read(await self._get(name=self._name(token), holder=self._holder, use=True))

    def _name(self, token: str) -> str:
        return f"{self._family}:{hashlib.sha256(token.encode(errors='replace')).hexdigest()}"


def _read(row: Sequence[str]) -> SignInLink | None:
    if not row:
        return None
    purpose, holder, credential_version = row
    account_id, _, user_id = holder.partition(":")
    return SignInLink(account_id, LinkPurpose(purpose), credential_version, user_id)
