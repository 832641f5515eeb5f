"""Operators of the web pages, whose names and passwords are apart from every account's."""

import re
from collections.abc import Mapping, Sequence

from serve_app.accounts.sessions import OPERATORS
from serve_app.accounts.sign_in import Passwords
from serve_app.domain.accounts import Operator
from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import InvalidParameter
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, read_records

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class OperatorStore:
    """Keeps operators in Redis, with argon2id hashes of their passwords."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._passwords = Passwords(redis)

    async def create(self, name: str, *, password: str | None = None) -> Operator:
        """Create an operator.

        Raises `InvalidParameter` for a name in use, and for an invalid name or password.
        """
        if not _NAME.fullmatch(name):
            raise InvalidParameter("name: must be 1 to 63 of a-z 0-9 . _ -, a letter or digit first")
        hashed = None if password is None else await self._passwords.hash(password)
        seconds, micros = await self._redis.time()
        created = seconds * 1000 + micros // 1000
        pipeline = self._redis.pipeline()
        pipeline.hsetnx(redis_key("operator", name), "created", created)
        pipeline.zadd(redis_key("operators"), {name: created}, nx=True)
        is_new, _ = await pipeline.execute()
        if not is_new:
            raise InvalidParameter(f"name: an operator called {name!r} exists")
        # a version of its own: nothing that was given to an earlier operator of this name is good for this one
        row = {"created": created, "password_changes": created} | ({} if hashed is None else {"password": hashed})
        await self._redis.hset(redis_key("operator", name), mapping=row)
        return _read(name, {field: str(value) for field, value in row.items()})

    async def list(self) -> Sequence[Operator]:
        """List all operators, oldest first."""
        names: list[str] = await self._redis.zrange(redis_key("operators"), 0, -1)
        rows = await read_records(self._redis, names, "operator")
        return [_read(name, row) for name, row in rows.items() if "created" in row]

    async def get(self, name: str) -> Operator | None:
        row = await self._row(name)
        return _read(name, row) if row else None

    async def set_password(self, name: str, password: str) -> str:
        """Set the password, end the operator's sessions and links, and return the new credential version.

        Raises `NotFound`, `InvalidParameter`.
        """
        return await self._passwords.set(OPERATORS.holder(name), password)

    async def check_password(self, name: str, password: str) -> Operator | None:
        """Return the operator if the password is right. An unknown name takes as long as a wrong password."""
        row = await self._row(name if _NAME.fullmatch(name) else "")
        matches = await self._passwords.matches(row.get("password"), password)
        return _read(name, row) if matches else None

    async def delete(self, name: str) -> bool:
        """Remove an operator, whose sessions and links end; False when there is none."""
        pipeline = self._redis.pipeline()
        pipeline.delete(redis_key("operator", name))
        pipeline.zrem(redis_key("operators"), name)
        deleted, _ = await pipeline.execute()
        return bool(deleted)

    async def _row(self, name: str) -> Mapping[str, str]:
        row: dict[str, str] = await self._redis.hgetall(redis_key("operator", name))
        return row if "created" in row else {}


def _read(name: str, row: Mapping[str, str]) -> Operator:
    return Operator(
        name=name,
        created_at=from_epoch_ms(row["created"]),
        has_password="password" in row,
        credential_version=f"0.{row.get('password_changes', '0')}",  # credential_version.lua writes the same
    )
