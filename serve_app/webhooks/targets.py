"""Decides to which addresses webhooks may go: public ones by HTTPS, and others only where the operator names them.

A name is resolved once. All its addresses are checked, and the connection goes to one that was: a name that changes
between check and connection reaches nothing else.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

import httpx

from serve_app.domain.errors import InvalidParameter
from serve_app.settings import Network

LONGEST_URL = 1_000
PUBLIC_PORT = 443
"""Public receivers listen here, since it is the port that a cluster's network policy opens."""
RESOLVE_S = 5.0
RESOLVED_AT_ONCE = 16
CONNECTIONS_TRIED = 3
"""At most this many addresses of a name are connected to, one after the other."""

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a name for a port. Raises `OSError` where there are none."""

_GLOBAL_V6 = IPv6Network("2000::/3")
_REFUSED: Sequence[Network] = [
    ip_network(each)
    for each in (
        "168.63.129.16/32",  # Azure's metadata and DNS, at a public address
        "192.0.0.0/24",  # protocol assignments, and Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64 within a network
        "2001::/23",  # Teredo, ORCHID, benchmarks: protocol assignments
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
]
"""Addresses that lead elsewhere than to a public server, beside those that `ipaddress` calls not global."""


class Target(NamedTuple):
    """An address that was checked: where to connect, and whom to ask for."""

    url: httpx.URL
    addresses: Sequence[str]

    @property
    def pinned(self) -> Sequence[httpx.URL]:
        """Return the URL with each checked address in place of the name."""
        return [self.url.copy_with(host=address) for address in self.addresses[:CONNECTIONS_TRIED]]


class Targets:
    """Checks the URLs of webhooks. `networks` may be reached although they are private, by HTTP too, at any port."""

    def __init__(self, networks: Sequence[Network], *, resolve: Resolve | None = None) -> None:
        self._networks = networks
        self._threads = ThreadPoolExecutor(RESOLVED_AT_ONCE, thread_name_prefix="webhook names")
        self._resolve = resolve or self._ask_system

    async def check(self, text: str, field: str = "url") -> Target:
        """Return where a webhook goes. Raises `InvalidParameter`, which names `field`, for one that may not be."""
        url = _read(text, field)
        host, port = url.host, url.port or (80 if url.scheme == "http" else PUBLIC_PORT)
        try:
            async with asyncio.timeout(RESOLVE_S):
                addresses = list(dict.fromkeys(await self._resolve(host, port)))
        except (OSError, UnicodeError, TimeoutError):
            addresses = []
        if not addresses:
            raise InvalidParameter(f"{field}: no address was found for its host")
        found = [_parsed(address) for address in addresses]
        if all(address is not None and self._is_named(address) for address in found):
            return Target(url, addresses)
        if url.scheme != "https":
            raise InvalidParameter(f"{field}: must begin with https://")
        if port != PUBLIC_PORT:
            raise InvalidParameter(f"{field}: must be at port {PUBLIC_PORT}")
        if not all(address is not None and is_public(address) for address in found):
            raise InvalidParameter(f"{field}: must be at a public address")
        return Target(url, addresses)

    def _is_named(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        """Ask the machine's resolver, in threads of our own: a slow one holds up nothing else."""
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        rows = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return [str(row[4][0]) for row in rows]


def is_public(address: Address) -> bool:
    """Whether a server of the public internet may be there."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv6Address) and (address.scope_id is not None or address not in _GLOBAL_V6):
        return False
    return not any(address.version == network.version and address in network for network in _REFUSED)


def _parsed(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _read(text: str, field: str) -> httpx.URL:
    """Parse a URL once: what is checked is what is connected to. Raises `InvalidParameter`."""
    if len(text) > LONGEST_URL or not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise InvalidParameter(f"{field}: must be an address of at most {LONGEST_URL} visible ASCII characters")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError, UnicodeError):
        raise InvalidParameter(f"{field}: must be an address like https://example.com/hook") from None
    if url.scheme not in ("https", "http") or not url.host or url.port == 0:
        raise InvalidParameter(f"{field}: must be an address like https://example.com/hook")
    if url.userinfo or "@" in url.netloc.decode() or url.fragment:
        raise InvalidParameter(f"{field}: must be without a user, a password and a fragment")
    return url
