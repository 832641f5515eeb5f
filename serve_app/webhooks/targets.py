"""Decides to which addresses webhooks may go: public ones by HTTPS, and others only where the operator names them.

What creates a webhook looks at its form and at addresses that are written out: no name server delays or refuses it, or
tells a customer which names there are inside. A name is resolved when a message is sent, once. All its addresses are
checked, and the connection goes to one that was: a name that changes between check and connection reaches nothing else.
"""

import asyncio
import re
import socket
import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

import httpx
from aiodns import DNSResolver
from aiodns.error import DNSError

from serve_app.domain.errors import InvalidParameter
from serve_app.settings import Network

LONGEST_URL = 1_000
PUBLIC_PORT = 443
"""Public receivers listen here, since it is the port that a cluster's network policy opens."""
RESOLVE_S = 5.0
"""A name has this long to be resolved, and one that may not be reached is refused no sooner."""
TRIES, FIRST_TRY_S = 5, 1.0
"""c-ares doubles the time of each try, from 0.25 s on with a quick server: five last longer than `RESOLVE_S`."""
NOT_FOUND = "url: no address that webhooks may go to was found for its host"
CONNECTIONS_TRIED = 3
"""At most this many addresses of a name are connected to, one after the other."""
_NAME = re.compile(r"(?=.{1,253}$)(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""A host whose last part is a number is an IPv4 address, however it is written (WHATWG's URL standard)."""

Address = IPv4Address | IPv6Address

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
"""Addresses that lead elsewhere than to a public server, besides those that `ipaddress` does not call global."""


class Target(NamedTuple):
    """An address that was checked: where to connect, and whom to ask for."""

    url: httpx.URL
    addresses: Sequence[str]
    """Where to connect; none where a proxy does."""

    @property
    def pinned(self) -> Sequence[httpx.URL]:
        """Return the URL with each checked address in place of the name, or as it is for a proxy."""
        return [self.url.copy_with(host=address) for address in self.addresses[:CONNECTIONS_TRIED]] or [self.url]


class Targets:
    """Checks the URLs of webhooks. `networks` may be reached although they are private, by HTTP too, at any port."""

    def __init__(self, networks: Sequence[Network], *, by_proxy: bool = False) -> None:
        """Leave public receivers to a proxy where `by_proxy`, which may know names that cannot be resolved here."""
        self._networks = networks
        self._by_proxy = by_proxy

    def check(self, text: str, field: str = "url") -> None:
        """Raise `InvalidParameter`, which names `field`, for the URL of a webhook that may not be.

        Where `networks` are named, any name may lead there, and is taken.
        """
        url, address = _read(text, field)
        fault = "" if self._networks and address is None else self._fault(url, [address] if address else [])
        if fault:
            raise InvalidParameter(f"{field}: {fault}")

    async def find(self, text: str, resolver: DNSResolver) -> Target:
        """Return where a message goes. Raises `InvalidParameter`, by the same words after the same time for any name."""
        url, address = _read(text, "url")
        refused_at = time.monotonic() + RESOLVE_S
        try:
            async with asyncio.timeout(RESOLVE_S):
                addresses = [address] if address else await _resolved(url.raw_host.decode(), resolver)
        except (DNSError, TimeoutError):
            addresses = []
        is_inside = bool(addresses) and all(map(self._is_named, addresses))
        if (addresses or self._by_proxy) and not self._fault(url, addresses):
            return Target(url, [] if self._by_proxy and not is_inside else list(map(str, addresses)))
        await asyncio.sleep(refused_at - time.monotonic())
        raise InvalidParameter(NOT_FOUND)

    def _fault(self, url: httpx.URL, addresses: Sequence[Address]) -> str:
        """Return why no webhook may go to these addresses, of which there are none before a name is resolved."""
        if addresses and all(map(self._is_named, addresses)):
            return ""
        if url.scheme != "https":
            return "must begin with https://"
        if url.port not in (None, PUBLIC_PORT):
            return f"must be at port {PUBLIC_PORT}"
        return "" if all(map(is_public, addresses)) else "must be at a public address"

    def _is_named(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


async def _resolved(name: str, resolver: DNSResolver) -> list[Address]:
    found = await resolver.getaddrinfo(name, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(node.addr[0].decode()) for node in found.nodes))


def is_public(address: Address) -> bool:
    """Whether a server of the public internet may be there."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv6Address) and (address.scope_id is not None or address not in _GLOBAL_V6):
        return False
    return not any(address.version == network.version and address in network for network in _REFUSED)


def _read(text: str, field: str) -> tuple[httpx.URL, Address | None]:
    """Parse a URL once, and the address that its host may be. Raises `InvalidParameter`."""
    if len(text) > LONGEST_URL or not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise InvalidParameter(f"{field}: must be an address of at most {LONGEST_URL} visible ASCII characters")
    try:
        url = httpx.URL(text)
        address = _address(url.raw_host.decode()) if url.host else None  # `host` decodes names in IDNA's form
    except (httpx.InvalidURL, ValueError, OSError):
        raise InvalidParameter(f"{field}: must be an address like https://example.com/hook") from None
    if url.scheme not in ("https", "http") or not url.host or (url.port is not None and not 0 < url.port < 2**16):
        raise InvalidParameter(f"{field}: must be an address like https://example.com/hook")
    if url.userinfo or "@" in url.netloc.decode() or url.fragment:
        raise InvalidParameter(f"{field}: must be without a user, a password and a fragment")
    return url, address


def _address(host: str) -> Address | None:
    """Return the address that a host is, however it is written; None for a name. Raises `ValueError`, `OSError`."""
    if ":" in host:
        return ip_address(host)
    host = host.removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):  # never another machine (RFC 6761)
        return IPv4Address("127.0.0.1")
    if _NUMBER.fullmatch(host):
        return IPv4Address(socket.inet_aton(host))
    if not _NAME.fullmatch(host):
        raise ValueError(host)
    return None
