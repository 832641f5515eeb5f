"""Create, validate and hash the text of API keys."""

import base64
import hmac
import secrets
import string
import zlib
from dataclasses import dataclass

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
PREFIX, RANDOM, CHECK = "atl_", 32, 6


@dataclass(frozen=True, slots=True)
class KeyDigest:
    """The id under which a key is stored, and the whole digest that must match."""

    id: str
    digest: str


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


def hint_of(secret: str) -> str:
    """Return the first and last characters: enough to recognise a key, too few to guess it."""
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
