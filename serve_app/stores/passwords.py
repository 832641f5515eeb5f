"""Console passwords: argon2id hashes, checked in the same time whether one is stored or not."""

import asyncio
import secrets

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from serve_app.domain.errors import InvalidParameter

LENGTH = range(12, 129)
PASSES, MEMORY_KIB, LANES = 2, 19 * 1024, 1
"""argon2id at 19 MiB: 47 ms on two cores, OWASP's minimum. Two at a time per process, so logins cannot starve it."""


class Passwords:
    """Hashes and checks; one per process, so that its limit holds."""

    def __init__(self) -> None:
        self._hasher = PasswordHasher(time_cost=PASSES, memory_cost=MEMORY_KIB, parallelism=LANES)
        self._hashing = asyncio.Semaphore(2)
        self._decoy: str | None = None

    async def hash(self, password: str) -> str:
        """Hash a password. Raises `InvalidParameter` for one of a wrong length."""
        if len(password) not in LENGTH:
            raise InvalidParameter("password: must be 12 to 128 characters")
        async with self._hashing:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def matches(self, stored: str | None, password: str) -> bool:
        """Compare; False where nothing is stored, after as long as for a wrong password."""
        async with self._hashing:
            return await asyncio.to_thread(self._verify, stored, password)

    def _verify(self, stored: str | None, password: str) -> bool:
        if self._decoy is None:
            self._decoy = self._hasher.hash(secrets.token_urlsafe(16))
        try:
            self._hasher.verify(stored or self._decoy, password)
        except (VerificationError, InvalidHashError):
            return False
        return stored is not None
