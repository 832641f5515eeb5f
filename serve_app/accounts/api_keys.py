"""API keys: how their texts are made and checked, and how they are created, listed, replaced and revoked.

Redis holds the HMAC-SHA256 digests of keys, under a pepper that it does not hold.
"""

import base64
import hmac
import secrets
import string
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from serve_app.domain.accounts import ALL_SCOPES, ApiKey, Scope
from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.domain.errors import InvalidParameter, NotFound, TooManyKeys
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, read_records
from serve_app.store.script import Script, pairs

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
PREFIX, RANDOM, CHECK = "atl_", 32, 6


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """The id under which a key is stored, and the whole digest that must match."""

    id: str
    digest: str


KeySent = str | Sequence[KeyDigest]
"""What a caller has sent: a key, or what a token holds in place of one, its digest under each pepper."""


def new_secret() -> str:
    body = PREFIX + "".join(secrets.choice(BASE62) for _ in range(RANDOM))
    return body + _check_digits(body)


def is_well_formed(secret: str) -> bool:
    """Check that the last six characters are the CRC of the rest, so that a typo costs no call to Redis."""
    if len(secret) != len(PREFIX) + RANDOM + CHECK or not secret.startswith(PREFIX):
        return False
    if not secret.isascii():
        return False
    return hmac.compare_digest(secret[-CHECK:], _check_digits(secret[:-CHECK]))


def hash_secret(secret: str, pepper: bytes) -> KeyDigest:
    digest = hmac.digest(pepper, secret.encode(), "sha256")
    return KeyDigest(id="key_" + base32(digest[:16]), digest=digest.hex())


def digests_of(sent: KeySent, settings: Settings) -> Sequence[KeyDigest]:
    """Return a key's digests, that under the newest pepper first."""
    return [hash_secret(sent, pepper) for pepper in settings.key_peppers.values()] if isinstance(sent, str) else sent


def hint_of(secret: str) -> str:
    """Return the first and last characters: enough to recognize a key, too few to guess it."""
    return f"{secret[:8]}…{secret[-4:]}"


def base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _check_digits(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits: list[str] = []
    for _ in range(CHECK):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return "".join(reversed(digits))


MAX_ADAPTERS = 100
_BETWEEN = "\n"


def write_scopes(scopes: frozenset[Scope]) -> str:
    """Write scopes as a field. Raises `InvalidParameter` for none at all."""
    if not scopes:
        raise InvalidParameter(f"scopes: must name at least one of {', '.join(Scope)}")
    return "" if scopes == ALL_SCOPES else _BETWEEN.join(sorted(scopes))


def read_scopes(text: str) -> frozenset[Scope]:
    """Read scopes of a field; one that only a newer version knows allows nothing here."""
    return frozenset(scope for scope in Scope if scope in text.split(_BETWEEN)) if text else ALL_SCOPES


def write_adapters(adapters: frozenset[str] | None) -> str:
    """Write adapters as a field. Raises `InvalidParameter` for none at all, and for too many."""
    if adapters is None:
        return ""
    if not 1 <= len(adapters) <= MAX_ADAPTERS:
        raise InvalidParameter(f"adapters: must be 1 to {MAX_ADAPTERS} ids")
    return _BETWEEN.join(sorted(adapters))


def read_adapters(text: str) -> frozenset[str] | None:
    return frozenset(text.split(_BETWEEN)) if text else None


MAX_NAME = 100


class ApiKeyStore:
    """The keys of all accounts. A secret is shown once, when its key is created or rolled."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._create = Script(redis, "accounts/create_key")
        self._roll = Script(redis, "accounts/roll_key")
        self._limit = Script(redis, "accounts/limit_key")

    async def create(
        self,
        account_id: str,
        *,
        name: str = "",
        interfaces: frozenset[Variant],
        expires_in: timedelta | None = None,
        scopes: frozenset[Scope] = ALL_SCOPES,
        adapters: frozenset[str] | None = None,
        user_id: str = "",
        limit: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key and return it with its secret, which is never readable again.

        Raises `InvalidParameter`, `NotFound`, `TooManyKeys`.
        """
        if not interfaces:
            raise InvalidParameter("interfaces: must name at least one of a, b")
        if expires_in is not None and expires_in <= timedelta():
            raise InvalidParameter("expires_in: must be longer than zero")
        await self._check_limit(account_id, interfaces, limit)
        secret = new_secret()
        version, hashed = self._hash(secret)
        row = await self._create(
            key_id=hashed.id,
            digest=hashed.digest,
            hint=hint_of(secret),
            account=account_id,
            name=name.strip()[:MAX_NAME],
            interfaces="".join(sorted(interfaces)),
            life_ms=None if expires_in is None else milliseconds(expires_in),
            scopes=write_scopes(scopes),
            adapters=write_adapters(adapters),
            user=user_id,
            max_keys=self._settings.max_keys_per_account,
            limit=limit,
            pepper=version,
        )
        if not row:
            raise NotFound(f"no account {account_id!r}")
        self._check_number(row)
        return _read_key(hashed.id, pairs(row)), secret

    async def roll(self, key_id: str, *, grace: timedelta) -> tuple[ApiKey, str]:
        """Create a key's successor; the old key stops working after `grace`, everywhere.

        The successor has the same name, interfaces, scopes, adapters, limit and length of life. Raises `NotFound` for a
        key that does not work any more, and `TooManyKeys`: during the grace both count.
        """
        secret = new_secret()
        version, hashed = self._hash(secret)
        row = await self._roll(
            old_id=key_id,
            new_id=hashed.id,
            digest=hashed.digest,
            hint=hint_of(secret),
            grace_ms=milliseconds(grace),
            max_keys=self._settings.max_keys_per_account,
            pepper=version,
        )
        if not row:
            raise NotFound(f"no active key {key_id!r}")
        self._check_number(row)
        return _read_key(hashed.id, pairs(row)), secret

    async def set_limit(self, key_id: str, limit: int | None) -> ApiKey:
        """Limit the key's counted requests in a window of its plan; None: to the plan's own limit.

        Raises `NotFound` for a key that does not work any more, and `InvalidParameter`.
        """
        account_id, interfaces = await self._redis.hmget(redis_key("key", key_id), "account", "interfaces")
        if account_id is not None:
            await self._check_limit(account_id, frozenset(Variant(letter) for letter in interfaces or ""), limit)
        row = await self._limit(key_id=key_id, limit=limit)
        if not row:
            raise NotFound(f"no active key {key_id!r}")
        return _read_key(key_id, pairs(row))

    async def list(self, account_id: str) -> Sequence[ApiKey]:
        """List the account's keys, revoked and expired ones too, oldest first."""
        ids: list[str] = await self._redis.zrange(redis_key("keys", account_id), 0, -1)
        return [_read_key(key_id, row) for key_id, row in (await read_records(self._redis, ids, "key")).items()]

    async def account_of(self, key_id: str) -> str | None:
        """Return the account of a key, whatever its state."""
        return await self._redis.hget(redis_key("key", key_id), "account")

    async def revoke(self, key_id: str) -> bool:
        """Revoke a key, from the next request on, everywhere; False when there is no such key."""
        if not await self._redis.exists(redis_key("key", key_id)):
            return False
        await self._redis.hset(redis_key("key", key_id), "revoked", "1")
        return True

    async def _check_limit(self, account_id: str, interfaces: frozenset[Variant], limit: int | None) -> None:
        """Check a limit: a key with two plans may be limited to the larger, and each request meets its own plan too."""
        if limit is None:
            return
        names = await self._redis.hmget(redis_key("account", account_id), *(f"plan_{each}" for each in interfaces))
        plans = [self._settings.plan_named(each, name) for each, name in zip(interfaces, names, strict=True)]
        most = max(plan.limit for plan in plans)
        if not 1 <= limit <= most:
            raise InvalidParameter(f"limit: must be between 1 and {most}, the limit of the account's plan")

    def _hash(self, secret: str) -> tuple[int, KeyDigest]:
        """Return the version of the pepper that makes new keys, and the digest under it."""
        version, pepper = next(iter(self._settings.key_peppers.items()))
        return version, hash_secret(secret, pepper)

    def _check_number(self, row: Sequence[str]) -> None:
        if row == ["full"]:
            most = self._settings.max_keys_per_account
            keys = f"{most} API key{'' if most == 1 else 's'}"
            raise TooManyKeys(f"An account can have at most {keys} active at a time. Revoke one first.")


def _read_key(key_id: str, row: Mapping[str, str]) -> ApiKey:
    return ApiKey(
        id=key_id,
        account_id=row["account"],
        name=row["name"],
        hint=row["hint"],
        interfaces=frozenset(Variant(letter) for letter in row["interfaces"]),
        created_at=from_epoch_ms(row["created"]),
        last_used_at=from_epoch_ms(row["used"]) if "used" in row else None,
        last_used_from=row.get("used_from", ""),
        expires_at=from_epoch_ms(row["expires"]) if "expires" in row else None,
        revoked="revoked" in row,
        scopes=read_scopes(row.get("scopes", "")),
        adapters=read_adapters(row.get("adapters", "")),
        user_id=row.get("user", ""),
        limit=int(row["limit"]) if "limit" in row else None,
    )
