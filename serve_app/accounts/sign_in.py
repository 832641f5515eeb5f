"""Checks who signs in, by a password or by a one-time link, and limits how often somebody may try.

`SignIns` makes callers wait longer and longer between tries, but never locks an account's owner out. It also guards
acts for which a session or an API key is not enough. `Throttle` limits other attempts by fixed windows.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from math import ceil
from typing import NamedTuple, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from serve_app.accounts.audit import AuditLog
from serve_app.accounts.sessions import Holder, SessionRealm
from serve_app.domain.audit import Act, Actor
from serve_app.domain.durations import milliseconds
from serve_app.domain.errors import InvalidParameter, NotFound, TooManyTries
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

W = TypeVar("W")

LENGTH = range(12, 129)
"""A password has at least 12 and at most 128 characters."""
PASSES, MEMORY_KIB, LANES = 2, 19 * 1024, 1
"""One argon2id hash takes 19 MiB, OWASP's minimum, and 47 ms on two cores."""


class Passwords:
    """Stores passwords as argon2id hashes, and checks them; one object hashes at most two at a time."""

    def __init__(self, redis: RedisClient) -> None:
        self._set = Script(redis, "accounts/set_password")
        self._hasher = PasswordHasher(time_cost=PASSES, memory_cost=MEMORY_KIB, parallelism=LANES)
        self._hashing = asyncio.Semaphore(2)
        self._decoy: str | None = None

    async def hash(self, password: str) -> str:
        """Hash a password. Raises `InvalidParameter` for one of a wrong length."""
        if len(password) not in LENGTH:
            raise InvalidParameter("password: must be 12 to 128 characters")
        async with self._hashing:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def set(self, holder: str, password: str) -> str:
        """Set a holder's password and return the new credential version; earlier sessions and links have ended.

        Raises `NotFound`, `InvalidParameter`.
        """
        credential_version: str = await self._set(holder=holder, password_hash=await self.hash(password))
        if not credential_version:
            raise NotFound(f"no {holder.replace(':', ' ')}")
        return credential_version

    async def matches(self, stored: str | None, password: str) -> bool:
        """Compare; return False where nothing is stored, after the time that a wrong password takes."""
        async with self._hashing:
            return await asyncio.to_thread(self._verify, stored, password[: LENGTH.stop])

    def _verify(self, stored: str | None, password: str) -> bool:
        if self._decoy is None:
            self._decoy = self._hasher.hash(secrets.token_urlsafe(16))
        try:
            self._hasher.verify(stored or self._decoy, password)
        except (VerificationError, InvalidHashError):
            return False
        return stored is not None


LINK_LIFE = timedelta(hours=24)


class LinkPurpose(StrEnum):
    """What the holder of a link may do."""

    SIGN_IN = "sign_in"
    NEW_PASSWORD = "new_password"


class SignInLink(NamedTuple):
    """A link names whom it signs in, and for what."""

    holder: Holder
    purpose: LinkPurpose


class SignInLinks:
    """Links of one realm that sign in or set a new password, once, by a random token whose digest Redis holds.

    Operators give them to people, and `atelier up` prints one for its demo account. A link is void as soon as the
    password is changed or the account disabled.
    """

    def __init__(self, redis: RedisClient, realm: SessionRealm) -> None:
        self._realm = realm
        self._create = Script(redis, "accounts/create_sign_in_link")
        self._get = Script(redis, "accounts/sign_in_link")

    async def create(
        self, holder_id: str, purpose: LinkPurpose, *, user_id: str = "", life: timedelta = LINK_LIFE
    ) -> str:
        """Return the token of a new link: 256 random bits, for the link's path after `/links/`."""
        token = secrets.token_urlsafe(32)
        holder = self._realm.holder(holder_id, user_id)
        await self._create(name=self._name(token), purpose=purpose, holder=holder, life_ms=milliseconds(life))
        return token

    async def get(self, token: str) -> SignInLink | None:
        """Return the link without using it; None when it was used, is too old or void."""
        return _read(await self._get(name=self._name(token), use=False))

    async def use(self, token: str) -> SignInLink | None:
        """Return the link, for the only time."""
        return _read(await self._get(name=self._name(token), use=True))

    def _name(self, token: str) -> str:
        return f"{self._realm.prefix}sign_in_link:{hashlib.sha256(token.encode(errors='replace')).hexdigest()}"


def _read(row: Sequence[str]) -> SignInLink | None:
    return SignInLink(Holder(*row[:3]), LinkPurpose(row[3])) if row else None


LONGEST_NAME = 100
"""Names have at most this many characters; a longer one counts as unknown."""
LIFE = timedelta(hours=1)
"""Tries are forgotten this long after the last one."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The first `free` tries are not held up; from then on a wait of `first` doubles up to `longest`."""

    free: int
    first: timedelta
    longest: timedelta


HERE = Waits(5, timedelta(seconds=15), timedelta(minutes=15))
"""These are the waits for one account from one address, or on one device."""
EVERYWHERE = Waits(20, timedelta(seconds=1), timedelta(seconds=30))
"""These are the waits for one account from everywhere. `longest` bounds what others can do to its owner."""


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A browser in which the account's owner has signed in before."""

    account_id: str
    device_id: str


@dataclass(frozen=True, slots=True)
class Try:
    """A try to sign in, whose password is looked at unless it has to wait."""

    wait: timedelta
    counted_at: str
    """The Redis key that counts the tries from the same source: `sign_in:account[:user]:source`."""

    @property
    def account_id(self) -> str:
        """Return the account's id; where there is none, an id that no account has."""
        return self.counted_at.split(":")[1]


class SignIns:
    """Counts tries by account and by address.

    Redis holds digests of addresses and of unknown names.
    """

    def __init__(self, redis: RedisClient, audit: AuditLog) -> None:
        self._audit = audit
        self._count = Script(redis, "accounts/sign_in")
        self._forget = Script(redis, "accounts/forget_sign_in")

    async def check(
        self,
        look: Callable[[], Awaitable[W | None]],
        name: str,
        by: Actor,
        *,
        log: str = "",
        device: KnownDevice | None = None,
        within: str = "",
    ) -> W | None:
        """Return what `look` returns: who has a name and a password; None for a wrong one, which is recorded.

        The audit log `log` keeps the failure, or else that of the account with this name. Tries are counted until the
        right password takes them back; `device` and `within` as for `count`. Raises `TooManyTries` without looking.
        """
        counted = await self.count(name, by.address, device, within=within)
        if counted.wait:
            raise TooManyTries(ceil(counted.wait.total_seconds()))
        who = await look()
        if who is None:
            await self._audit.record(log or counted.account_id, Act.SIGN_IN_FAILED, by)
        else:
            await self.forget(counted)
        return who

    async def count(self, name: str, address: str, device: KnownDevice | None, *, within: str = "") -> Try:
        """Count a try, in one round trip whether there is such an account or not.

        `name` may be its id or its name. With `within`, whoever does not belong to that account is counted as unknown.
        """
        wait_ms, counted_at = await self._count(
            name=name if len(name) <= LONGEST_NAME else "",
            within=within,
            name_digest=_digest(name),
            source=f"address_{_digest(address)}",
            device=f"device_{_digest(device.device_id)}" if device else "",
            device_account=device.account_id if device else "",
            life_ms=milliseconds(LIFE),
            free_here=HERE.free,
            first_here_ms=milliseconds(HERE.first),
            longest_here_ms=milliseconds(HERE.longest),
            free_all=EVERYWHERE.free,
            first_all_ms=milliseconds(EVERYWHERE.first),
            longest_all_ms=milliseconds(EVERYWHERE.longest),
        )
        return Try(timedelta(milliseconds=wait_ms), counted_at)

    async def forget(self, counted: Try) -> None:
        """Forget the tries from this try's source, after the right password, and no others."""
        await self._forget(counted_at=counted.counted_at)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Limit:
    """Allows at most `tries` of `what` in `per`, from the first try."""

    what: str
    tries: int
    per: timedelta


class Throttle:
    """Counts tries by source in windows that begin with the first. Redis holds only digests of the source."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def hit(self, limit: Limit, *source: str) -> bool:
        """Count one try; return whether it is one too many. Raises `StoreUnavailable`.

        A try whose answer the connection lost may count twice.
        """
        name = redis_key("throttle", limit.what, _digest("\0".join(source)))
        pipeline = self._redis.pipeline()
        pipeline.set(name, 0, px=limit.per, nx=True)
        pipeline.incr(name)
        _, tries = await pipeline.execute()
        return tries > limit.tries
