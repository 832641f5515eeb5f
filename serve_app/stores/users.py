"""Users that an account's owner invites, each with a name and a role.

The account's own user, the owner, has no record here: it is the account itself.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.accounts import Role, User
from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.stores.api_key_format import base32
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Script

MOST = 100
"""Of one account."""
_NAME = re.compile(r"[^\s@:]+@[^\s@:]+")
_ID = re.compile(r"user_[a-z2-7]{26}")
NAME_RULE = "a name like an e-mail address: ann@example, at most 100 characters"


class UserStore:
    """Users in Redis. Their passwords are set by `AccountStore.set_password`, as the account's own is."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._create = Script(redis, "create_user")
        self._remove = Script(redis, "remove_user")

    async def create(self, account_id: str, name: str, role: Role) -> User:
        """Create a user, who cannot sign in before a link was used to set a password.

        Raises `InvalidParameter`, `NotFound`.
        """
        name = name.strip()
        if not _NAME.fullmatch(name) or len(name) > 100 or not name.isprintable():
            raise InvalidParameter(f"name: must be {NAME_RULE}")
        user_id = "user_" + base32(secrets.token_bytes(16))
        status = await self._create(account=account_id, user=user_id, name=name, role=role, most=MOST)
        if status == "taken":
            raise InvalidParameter("name: is in use")
        if status == "full":
            raise InvalidParameter(f"name: at most {MOST} users of an account")
        found = await self.get(account_id, user_id)
        if found is None:
            raise NotFound(f"no account {account_id!r}")
        return found

    async def list(self, account_id: str) -> Sequence[User]:
        """The invited users, oldest first."""
        ids: Sequence[str] = await self._redis.zrange(redis_key("users", account_id), 0, -1)
        found = [await self.get(account_id, user_id) for user_id in ids]
        return [user for user in found if user is not None]

    async def get(self, account_id: str, user_id: str) -> User | None:
        if not _ID.fullmatch(user_id):
            return None
        row: dict[str, str] = await self._redis.hgetall(redis_key("user", account_id, user_id))
        return read_user(user_id, row) if row else None

    async def remove(self, account_id: str, user_id: str) -> bool:
        """End the user's sessions and links, and revoke the keys it made; False when there is none."""
        return bool(await self._remove(account=account_id, user=user_id))


def read_user(user_id: str, row: Mapping[str, str]) -> User:
    return User(
        id=user_id,
        name=row["name"],
        role=Role(row["role"]),
        has_password="password" in row,
        created_at=from_epoch_ms(row["created"]),
    )
