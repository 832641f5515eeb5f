"""Which key a request carries, and in which header: read before anything else, and never from the body."""

from starlette.datastructures import Headers

from serve_app.domain.errors import AmbiguousCredentials, Unauthorized
from serve_app.domain.requests import Variant


def bearer_key(headers: Headers) -> str:
    """The key of `Authorization: Bearer <key>`; anything else there, or two such lines, is `Unauthorized`."""
    lines = headers.getlist("authorization")
    if len(lines) > 1:
        raise Unauthorized("Send one Authorization header.")
    scheme, _, key = (lines[0] if lines else "").strip(" ").partition(" ")
    if scheme.lower() != "bearer" or not key.strip(" "):
        raise Unauthorized("Send your API key as 'Authorization: Bearer <API_KEY>'.")
    return key.strip(" ")


def header_key(headers: Headers) -> str:
    """The key of `X-API-Key: <key>`; none, or two such lines, is `Unauthorized`."""
    lines = headers.getlist("x-api-key")
    if len(lines) > 1:
        raise Unauthorized("Send one X-API-Key header.")
    if not lines or not lines[0].strip(" "):
        raise Unauthorized("Send your API key as 'X-API-Key: <API_KEY>'.")
    return lines[0].strip(" ")


def spoken_variant(headers: Headers) -> Variant:
    """Which contract the credential speaks, where the path does not say.

    Bearer is A, `X-API-Key` is B, both are `AmbiguousCredentials`. Another scheme beside `X-API-Key` is a proxy's business: B.
    """
    lines = headers.getlist("authorization")
    if len(lines) > 1:
        raise Unauthorized("Send one Authorization header.")
    bearer = bool(lines) and lines[0].strip(" ").partition(" ")[0].lower() == "bearer"
    api_key = "x-api-key" in headers
    if bearer and api_key:
        raise AmbiguousCredentials("Send either 'Authorization: Bearer' or 'X-API-Key', not both.")
    if not bearer and not api_key:
        raise Unauthorized("Send your API key as 'Authorization: Bearer <API_KEY>' or as 'X-API-Key: <API_KEY>'.")
    return Variant.A if bearer else Variant.B
