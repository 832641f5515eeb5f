"""Growing waits between tries to sign in, which never lock an account's owner out."""

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from redis.asyncio import Redis

from serve_app.domain.durations import milliseconds
from serve_app.stores.script import Script

NAME_LENGTH = 100
"""What is longer names no account."""
LIFE = timedelta(hours=1)
"""After the last try, tries are forgotten."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The first `free` tries are not held up; from then on a wait of `first` doubles up to `longest`."""

    free: int
    first: timedelta
    longest: timedelta


HERE = Waits(5, timedelta(seconds=15), timedelta(minutes=15))
"""For one account from one address, or on one device."""
EVERYWHERE = Waits(20, timedelta(seconds=1), timedelta(seconds=30))
"""For one account from everywhere. `longest` is the most that others can make its owner wait on a new device."""


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A browser in which the account's owner has signed in before."""

    account_id: str
    device_id: str


@dataclass(frozen=True, slots=True)
class Try:
    """A try to sign in: to be looked at, unless it has to wait."""

    wait: timedelta
    counted_at: str

    @property
    def account_id(self) -> str:
        """Return the account's id; where there is none, an id that no account has."""
        return self.counted_at.split(":")[1]


class SignIns:
    """Counts tries by account and by address.

    Redis holds digests of addresses and of unknown names.
    """

    def __init__(self, redis: Redis) -> None:
        self._count = Script(redis, "sign_in")
        self._forget = Script(redis, "forget_sign_in")

    async def count(self, name: str, address: str, device: KnownDevice | None, *, within: str = "") -> Try:
        """Count a try, in one round trip whether there is such an account or not.

        `name` may be its id or its name. With `within`, whoever does not belong to that account is counted as unknown.
        """
        wait_ms, counted_at = await self._count(
            name=name if len(name) <= NAME_LENGTH else "",
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
