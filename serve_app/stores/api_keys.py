"""API keys as text: how a secret is made and told from a typo, the name it is kept under, the record that is shown again."""

import base64
import hmac
import secrets
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.domain.accounts import ApiKey
from serve_app.domain.requests import Variant
from serve_app.stores.records import when

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
PREFIX, RANDOM, CHECK = "atl_", 32, 6


@dataclass(frozen=True, slots=True)
class KeyName:
    """What a secret is looked up by, and the whole digest that must match."""

    id: str
    digest: str


def new_secret() -> str:
    body = PREFIX + "".join(secrets.choice(BASE62) for _ in range(RANDOM))
    return body + _check_digits(body)


def is_well_formed(secret: str) -> bool:
    """A typo or a random string is turned away without asking Redis: the last six characters are a CRC of the rest."""
    if len(secret) != len(PREFIX) + RANDOM + CHECK or not secret.startswith(PREFIX):
        return False
    if not secret.isascii():
        return False
    return hmac.compare_digest(secret[-CHECK:], _check_digits(secret[:-CHECK]))


def name_of(secret: str, pepper: bytes) -> KeyName:
    digest = hmac.digest(pepper, secret.encode(), "sha256")
    return KeyName(id="key_" + base32(digest[:16]), digest=digest.hex())


def hint_of(secret: str) -> str:
    """The first and last characters: enough to know a key by, too little to guess it."""
    return f"{secret[:8]}…{secret[-4:]}"


def read_key(key_id: str, row: Mapping[str, str]) -> ApiKey:
    return ApiKey(
        id=key_id,
        account_id=row["account"],
        name=row["name"],
        hint=row["hint"],
        interfaces=frozenset(Variant(letter) for letter in row["interfaces"]),
        created_at=when(row["created"]),
        last_used_at=when(row["used"]) if "used" in row else None,
        expires_at=when(row["expires"]) if "expires" in row else None,
        revoked="revoked" in row,
    )


def base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _check_digits(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits: list[str] = []
    for _ in range(CHECK):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return "".join(reversed(digits))
