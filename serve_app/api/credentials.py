"""Reads a request's API key from its headers, before anything else, and never from the body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from serve_app.accounts.api_keys import KeySent
from serve_app.domain.errors import AmbiguousCredentials, Unauthorized
from serve_app.domain.requests import Variant

SHARED_PATH = "/v1/generate"
"""A `POST` to this path goes to the interface that the credential chooses."""


class Credential(NamedTuple):
    """A key as sent, and the interface whose header carried it."""

    key: KeySent
    variant: Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class CredentialScheme:
    """How callers of one application send their key: how it is read, requested by a 401, documented."""

    read: Callable[[Headers], Credential]
    challenge: str
    security_schemes: Mapping[str, dict[str, Any]]


def read_bearer(headers: Headers) -> Credential:
    """Read the key of `Authorization: Bearer <key>`. Raises `Unauthorized` for anything else there."""
    scheme, _, key = _only_line(headers, "Authorization").partition(" ")
    if scheme.lower() != "bearer" or not key.strip(" "):
        raise Unauthorized("Send your API key as 'Authorization: Bearer <API_KEY>'.")
    return Credential(key.strip(" "), Variant.A)


def read_api_key(headers: Headers) -> Credential:
    """Read the key of `X-API-Key: <key>`. Raises `Unauthorized` for none, or two such lines."""
    key = _only_line(headers, "X-API-Key")
    if not key:
        raise Unauthorized("Send your API key as 'X-API-Key: <API_KEY>'.")
    return Credential(key, Variant.B)


def read_either(headers: Headers) -> Credential:
    """Read the key of the header that was sent. Raises `AmbiguousCredentials` for both."""
    return read_bearer(headers) if chosen_variant(headers) is Variant.A else read_api_key(headers)


def chosen_variant(headers: Headers) -> Variant:
    """Return the interface that the credential chooses, where the path does not.

    Bearer is A, `X-API-Key` is B, both are `AmbiguousCredentials`. Another scheme of `Authorization` next to
    `X-API-Key` comes from a proxy, and the request is B's.
    """
    is_bearer = _only_line(headers, "Authorization").partition(" ")[0].lower() == "bearer"
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


def _only_line(headers: Headers, name: str) -> str:
    """Return a header's value, '' without it. Raises `Unauthorized` where it was sent twice."""
    lines = headers.getlist(name)
    if len(lines) > 1:
        raise Unauthorized(f"Send one {name} header.")
    return lines[0].strip(" ") if lines else ""


_BEARER = {"bearer": {"type": "http", "scheme": "bearer"}}
_API_KEY = {"apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}

BEARER = CredentialScheme(read=read_bearer, challenge='Bearer realm="atelier"', security_schemes=_BEARER)
API_KEY = CredentialScheme(read=read_api_key, challenge='ApiKey realm="atelier"', security_schemes=_API_KEY)
EITHER = CredentialScheme(
    read=read_either,
    challenge=f"{BEARER.challenge}, {API_KEY.challenge}",
    security_schemes=_BEARER | _API_KEY,
)
