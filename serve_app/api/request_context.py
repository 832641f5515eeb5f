"""What is known about the request being answered, and its caller's address: the connection's, or a trusted proxy's."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.credentials import Credential
from serve_app.domain.accounts import Caller, Window
from serve_app.domain.requests import Variant
from serve_app.settings import Network

UNKNOWN = "unknown"
"""All callers of whom nothing can be believed have this one address."""
_LOOPBACK = "127.0.0.1"
_OF_PROXIES = (b"x-atelier-proxy", b"x-forwarded-for", b"x-forwarded-proto")
_REFUSED = JSONResponse(
    {"error": {"code": "forbidden", "message": "Call the service's HTTP port: this one is its proxy's alone."}}, 403
)
_Address = IPv4Address | IPv6Address


def client_address(scope: Scope, trusted: Sequence[Network]) -> str:
    """Return the address by which a caller's tries are counted, or its network for IPv6.

    A caller with IPv6 has a whole network. uvicorn trusts proxies on 127.0.0.1 by default and replaces the connection's
    address by theirs. Here only the proxies in `trusted` are trusted; 127.0.0.1 too only if it is in it.
    """
    peer: str = scope["client"][0] if scope.get("client") else UNKNOWN
    lines = Headers(scope=scope).getlist("x-forwarded-for")
    forwarded = [part.strip() for line in lines for part in line.split(",") if part.strip()]
    if peer in forwarded or peer in map(_host, forwarded):  # the server has believed it, or the caller names itself
        if peer != _nearest(forwarded) or not _is_trusted(_parse(_LOOPBACK), trusted):
            return UNKNOWN
    elif not _is_trusted(_parse(peer), trusted):
        return _countable(_parse(peer))
    for part in reversed(forwarded):
        address = _parse(_host(part))
        if not _is_trusted(address, trusted):
            return _countable(address)
    return _countable(_parse(peer))


def with_forwarded_address(app: ASGIApp, secret: str) -> ASGIApp:
    """Wrap the app for HAProxy, which forwards the caller's address together with a secret header.

    Requests without it came straight to this replica's port, past the proxy's limits: they are answered with 403.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope)
            if not hmac.compare_digest(given.get("x-atelier-proxy", "").encode(), secret.encode()):
                await _REFUSED(scope, receive, send)
                return
            forwarded, scheme = given.getlist("x-forwarded-for"), given.get("x-forwarded-proto", "http")
            kept = [pair for pair in scope["headers"] if pair[0] not in _OF_PROXIES]
            scope = {**scope, "client": (forwarded[0], 0), "scheme": scheme, "headers": kept}
        await app(scope, receive, send)

    return answer


def _nearest(forwarded: Sequence[str]) -> str:
    """Return the address that uvicorn takes for the caller's, when 127.0.0.1 forwards."""
    hosts = [_host(part) for part in forwarded]
    return next((host for host in reversed(hosts) if host != _LOOPBACK), hosts[0])


def _host(part: str) -> str:
    """Return an address without its port: `[::1]:80`, `10.0.0.1:80`."""
    if part.startswith("["):
        return part[1:].partition("]")[0]
    return part.partition(":")[0] if part.count(":") == 1 else part


def _parse(host: str) -> _Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _is_trusted(address: _Address | None, trusted: Sequence[Network]) -> bool:
    return address is not None and any(address in network for network in trusted)


def _countable(address: _Address | None) -> str:
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address.packed, 64), strict=False))
    return UNKNOWN if address is None else str(address)


_KEY = "atelier.context"


@dataclass(slots=True)
class RequestContext:
    """The middleware creates it, authentication fills it in, and it is read when the response starts.

    `variant` is the interface whose lowest plan an unknown caller sees in the rate headers.
    """

    request_id: str
    variant: Variant | None = None
    window: Window | None = None
    caller: Caller | None = None
    credential: Credential | None = None
    """The key for which a token in the request's address stands; None where a header holds the key."""
    route: str = ""
    """The route that is measured for an answer that no application gave."""
    error_code: str = ""
    """The code in an error answer; empty for any other."""

    @classmethod
    def of(cls, request: HTTPConnection | Scope) -> "RequestContext":
        return request[_KEY]

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
