"""Reads a request's API key from its headers, before anything else, and never from the body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from serve_app.domain.errors import AmbiguousCredentials, Unauthorized
from serve_app.domain.requests import Variant

SHARED_PATH = "/v1/generate"
"""`POST` here goes to the interface that the credential chooses."""


class Credential(NamedTuple):
    """A key as sent, and the interface whose header carried it."""

    key: str
    variant: Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class CredentialScheme:
    """How callers of one application send their key: how it is read, requested by a 401, documented."""

    read: Callable[[Headers], Credential]
    challenge: str
    security_schemes: Mapping[str, dict[str, Any]]


def read_bearer(headers: Headers) -> Credential:
    """Read the key of `Authorization: Bearer <key>`. Raises `Unauthorized` for anything else there."""
    lines = headers.getlist("authorization")
    if len(lines) > 1:
        raise Unauthorized("Send one Authorization header.")
    scheme, _, key = (lines[0] if lines else "").strip(" ").partition(" ")
    if scheme.lower() != "bearer" or not key.strip(" "):
        raise Unauthorized("Send your API key as 'Authorization: Bearer <API_KEY>'.")
    return Credential(key.strip(" "), Variant.A)


def read_api_key(headers: Headers) -> Credential:
    """Read the key of `X-API-Key: <key>`. Raises `Unauthorized` for none, or two such lines."""
    lines = headers.getlist("x-api-key")
    if len(lines) > 1:
        raise Unauthorized("Send one X-API-Key header.")
    if not lines or not lines[0].strip(" "):
        raise Unauthorized("Send your API key as 'X-API-Key: <API_KEY>'.")
    return Credential(lines[0].strip(" "), Variant.B)


def read_either(headers: Headers) -> Credential:
    """Read the key of the header that was sent. Raises `AmbiguousCredentials` for both."""
    return read_bearer(headers) if chosen_variant(headers) is Variant.A else read_api_key(headers)


def chosen_variant(headers: Headers) -> Variant:
    """Return the interface that the credential chooses, where the path does not.

    Bearer is A, `X-API-Key` is B, both are `AmbiguousCredentials`. Another scheme beside `X-API-Key` comes from a proxy: B.
    """
    lines = headers.getlist("authorization")
    if len(lines) > 1:
        raise Unauthorized("Send one Authorization header.")
    is_bearer = bool(lines) and lines[0].strip(" ").partition(" ")[0].lower() == "bearer"
    has_api_key = "x-api-key" in headers
    if is_bearer and has_api_key:
        raise AmbiguousCredentials("Send either 'Authorization: Bearer' or 'X-API-Key', not both.")
    if not is_bearer and not has_api_key:
        raise Unauthorized("Send your API key as 'Authorization: Bearer <API_KEY>' or as 'X-API-Key: <API_KEY>'.")
    return Variant.A if is_bearer else Variant.B


def presumed_variant(headers: Headers) -> Variant:
    """Return the interface that an unknown caller probably meant."""
    has_bearer = headers.get("authorization", "").lower().startswith("bearer ")
    return Variant.B if "x-api-key" in headers and not has_bearer else Variant.A


_BEARER = {"bearer": {"type": "http", "scheme": "bearer"}}
_API_KEY = {"apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}

BEARER = CredentialScheme(read=read_bearer, challenge='Bearer realm="atelier"', security_schemes=_BEARER)
API_KEY = CredentialScheme(read=read_api_key, challenge='ApiKey realm="atelier"', security_schemes=_API_KEY)
EITHER = CredentialScheme(
    read=read_either,
    challenge=f"{BEARER.challenge}, {API_KEY.challenge}",
    security_schemes=_BEARER | _API_KEY,
)
