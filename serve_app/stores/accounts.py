"""Accounts, their API keys, and the gate that every request passes."""

import asyncio
import base64
import hmac
import secrets
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from redis.asyncio import Redis

from serve_app.domain.accounts import Account, ApiKey, Caller, Gate, Plan, Window
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.stores.redis import Rewrite, Script, key

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
KEY_PREFIX, KEY_RANDOM, KEY_CHECK = "atl_", 32, 6
NAME_LENGTH, PASSWORD_LENGTH = range(1, 101), range(12, 129)
PASSWORD_PASSES, PASSWORD_MEMORY_KIB, PASSWORD_LANES = 2, 19 * 1024, 1
"""argon2id at 19 MiB: 47 ms on two cores, OWASP's minimum. Two at a time per process, so logins cannot starve it."""


@dataclass(frozen=True, slots=True)
class _KeyName:
    """What a secret is looked up by, and the whole digest that must match."""

    id: str
    digest: str


class AccountStore:
    """Who may call, and how often. Secrets are kept as HMAC-SHA256 under a pepper that Redis does not hold."""

    def __init__(self, redis: Redis, settings: Settings, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._settings = settings
        self._gate = Script(redis, "gate", rewrite)
        self._open_account = Script(redis, "open_account")
        self._hasher = PasswordHasher(
            time_cost=PASSWORD_PASSES, memory_cost=PASSWORD_MEMORY_KIB, parallelism=PASSWORD_LANES
        )
        self._hashing = asyncio.Semaphore(2)
        self._decoy: str | None = None

    async def create_account(
        self, name: str, *, plan_a: str = "basic", plan_b: str = "free", password: str | None = None
    ) -> Account:
        """A new account. Raises `InvalidParameter` for a name in use, an unknown plan, a password of a wrong length."""
        name = name.strip()
        if len(name) not in NAME_LENGTH or not name.isprintable():
            raise InvalidParameter("name: must be 1 to 100 printable characters")
        self._check_plans(plan_a, plan_b)
        account_id = "acct_" + _random_base32()
        password_hash = await self._hash(password) if password is not None else ""
        if await self._open_account(account_id, name, plan_a, plan_b, password_hash) == "taken":
            raise InvalidParameter(f"name: an account called {name!r} exists")
        return await self._existing(account_id)

    async def accounts(self) -> list[Account]:
        """All accounts, oldest first."""
        ids: list[str] = await self._redis.zrange(key("accounts"), 0, -1)
        found = [await self._read(account_id) for account_id in ids]
        return [account for account in found if account is not None]

    async def account(self, id_or_name: str) -> Account | None:
        found = await self._read(id_or_name)
        if found is not None:
            return found
        account_id = await self._redis.get(key("name", id_or_name))
        return await self._read(account_id) if account_id else None

    async def set_plans(self, account_id: str, plan_a: str | None = None, plan_b: str | None = None) -> Account:
        """Change plans; the window that is open keeps its count. Raises `NotFound`, `InvalidParameter`."""
        self._check_plans(plan_a, plan_b)
        await self._existing(account_id)
        changes = {"plan_a": plan_a, "plan_b": plan_b}
        wanted = {field: plan for field, plan in changes.items() if plan is not None}
        if wanted:
            await self._redis.hset(key("account", account_id), mapping=wanted)
        return await self._existing(account_id)

    async def set_disabled(self, account_id: str, disabled: bool) -> Account:
        """A disabled account's keys and password stop working with the next request."""
        await self._existing(account_id)
        if disabled:
            await self._redis.hset(key("account", account_id), "disabled", "1")
        else:
            await self._redis.hdel(key("account", account_id), "disabled")
        return await self._existing(account_id)

    async def set_password(self, account_id: str, password: str) -> None:
        await self._existing(account_id)
        await self._redis.hset(key("account", account_id), "password", await self._hash(password))

    async def check_password(self, name: str, password: str) -> Account | None:
        """The account of a right password. An unknown name costs the same time as a wrong password."""
        account = await self.account(name)
        stored = await self._redis.hget(key("account", account.id), "password") if account else None
        async with self._hashing:
            matches = await asyncio.to_thread(self._verify, stored, password)
        return account if matches and account is not None and not account.disabled else None

    async def create_key(
        self, account_id: str, *, name: str = "", interfaces: frozenset[Variant]
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is never readable again."""
        if not interfaces:
            raise InvalidParameter("interfaces: must name at least one of a, b")
        await self._existing(account_id)
        secret = _new_secret()
        named = self._name(secret)
        now = datetime.now(UTC)
        record = {
            "digest": named.digest,
            "account": account_id,
            "name": name.strip()[: NAME_LENGTH.stop],
            "hint": f"{secret[:8]}…{secret[-4:]}",
            "interfaces": "".join(sorted(interfaces)),
            "created": int(now.timestamp() * 1000),
        }
        pipeline = self._redis.pipeline()
        pipeline.hset(key("key", named.id), mapping=record)
        pipeline.zadd(key("keys", account_id), {named.id: record["created"]})
        await pipeline.execute()
        return _api_key(named.id, {field: str(value) for field, value in record.items()}), secret

    async def keys(self, account_id: str) -> list[ApiKey]:
        """The account's keys, revoked ones too, oldest first."""
        ids: list[str] = await self._redis.zrange(key("keys", account_id), 0, -1)
        pipeline = self._redis.pipeline()
        for key_id in ids:
            pipeline.hgetall(key("key", key_id))
        rows: list[dict[str, str]] = await pipeline.execute() if ids else []
        return [_api_key(key_id, row) for key_id, row in zip(ids, rows, strict=True) if row]

    async def revoke_key(self, key_id: str) -> bool:
        """True if there is such a key; it stops working with the next request, everywhere."""
        if not await self._redis.exists(key("key", key_id)):
            return False
        await self._redis.hset(key("key", key_id), "revoked", "1")
        return True

    async def gate(self, secret: str, variant: Variant, *, counted: bool) -> Gate:
        """Who is calling and whether the plan has room, in one script. A counted request is counted before its body is read.

        An unknown, revoked, disabled or wrong-interface key has no caller and the lowest plan's window; nothing is counted.
        """
        plans = self._plans(variant)
        if not _is_well_formed(secret):
            return Gate(caller=None, window=_window(plans[0], used=0, ms_left=_ms(plans[0].window)), limited=False)
        named = self._name(secret)
        receipt = secrets.token_urlsafe(12) if counted else ""
        table = [word for plan in plans for word in (plan.name, plan.limit, _ms(plan.window))]
        answer: list[Any] = await self._gate(named.id, named.digest, variant, int(counted), receipt, len(plans), *table)
        status, account_id, account_name, plan_name, used, ms_left = answer
        plan = self._settings.plan_table[variant, plan_name]
        window = _window(plan, used=used, ms_left=ms_left)
        if status == "unknown":
            return Gate(caller=None, window=window, limited=False)
        caller = Caller(
            account_id=account_id,
            account_name=account_name,
            key_id=named.id,
            variant=variant,
            plan=plan,
            receipt=receipt,
        )
        return Gate(caller=caller, window=window, limited=status == "limited")

    async def window(self, account_id: str, variant: Variant) -> Window:
        """Where the account stands now; counts nothing."""
        pipeline = self._redis.pipeline()
        pipeline.hget(key("account", account_id), f"plan_{variant}")
        pipeline.scard(key("window", account_id, variant))
        pipeline.pttl(key("window", account_id, variant))
        plan_name, used, ms_left = await pipeline.execute()
        plan = self._settings.plan_table.get((variant, plan_name or ""), self._plans(variant)[0])
        return _window(plan, used=used, ms_left=ms_left if ms_left >= 0 else _ms(plan.window))

    def _plans(self, variant: Variant) -> list[Plan]:
        return [plan for plan in self._settings.plan_table.values() if plan.variant == variant]

    def _check_plans(self, plan_a: str | None, plan_b: str | None) -> None:
        for variant, name in ((Variant.A, plan_a), (Variant.B, plan_b)):
            if name is not None and (variant, name) not in self._settings.plan_table:
                known = ", ".join(plan.name for plan in self._plans(variant))
                raise InvalidParameter(f"plan_{variant}: must be one of {known}")

    def _name(self, secret: str) -> _KeyName:
        digest = hmac.digest(self._settings.pepper_bytes, secret.encode(), "sha256")
        return _KeyName(id="key_" + _base32(digest[:16]), digest=digest.hex())

    async def _existing(self, account_id: str) -> Account:
        found = await self._read(account_id)
        if found is None:
            raise NotFound(f"no account {account_id!r}")
        return found

    async def _read(self, account_id: str) -> Account | None:
        row: dict[str, str] = await self._redis.hgetall(key("account", account_id))
        if not row:
            return None
        return Account(
            id=account_id,
            name=row["name"],
            plan_a=row["plan_a"],
            plan_b=row["plan_b"],
            disabled="disabled" in row,
            created_at=_when(row["created"]),
        )

    async def _hash(self, password: str) -> str:
        if len(password) not in PASSWORD_LENGTH:
            raise InvalidParameter("password: must be 12 to 128 characters")
        async with self._hashing:
            return await asyncio.to_thread(self._hasher.hash, password)

    def _verify(self, stored: str | None, password: str) -> bool:
        if self._decoy is None:
            self._decoy = self._hasher.hash(secrets.token_urlsafe(16))
        try:
            self._hasher.verify(stored or self._decoy, password)
        except (VerificationError, InvalidHashError):
            return False
        return stored is not None


def _new_secret() -> str:
    body = KEY_PREFIX + "".join(secrets.choice(BASE62) for _ in range(KEY_RANDOM))
    return body + _check_digits(body)


def _is_well_formed(secret: str) -> bool:
    """A typo or a random string is turned away without asking Redis: the last six characters are a CRC of the rest."""
    if len(secret) != len(KEY_PREFIX) + KEY_RANDOM + KEY_CHECK or not secret.startswith(KEY_PREFIX):
        return False
    if not secret.isascii():
        return False
    return hmac.compare_digest(secret[-KEY_CHECK:], _check_digits(secret[:-KEY_CHECK]))


def _check_digits(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits: list[str] = []
    for _ in range(KEY_CHECK):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return "".join(reversed(digits))


def _api_key(key_id: str, row: Mapping[str, str]) -> ApiKey:
    return ApiKey(
        id=key_id,
        account_id=row["account"],
        name=row["name"],
        hint=row["hint"],
        interfaces=frozenset(Variant(letter) for letter in row["interfaces"]),
        created_at=_when(row["created"]),
        last_used_at=_when(row["used"]) if "used" in row else None,
        revoked="revoked" in row,
    )


def _window(plan: Plan, *, used: int, ms_left: int) -> Window:
    resets_at = datetime.now(UTC) + timedelta(milliseconds=ms_left)
    return Window(plan=plan, remaining=max(0, plan.limit - used), resets_at=resets_at)


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def _when(ms: str) -> datetime:
    return datetime.fromtimestamp(int(ms) / 1000, UTC)


def _random_base32() -> str:
    return _base32(secrets.token_bytes(16))


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()
