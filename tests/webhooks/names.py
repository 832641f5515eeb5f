"""A name server on the loopback, which answers as a test says, or not at all."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import cast

A, NO_SUCH_NAME = 1, 3


@dataclass
class NameServer(asyncio.DatagramProtocol):
    """Knows the IPv4 addresses of `names`, is silent about names in `.silent`, and denies any other."""

    names: Mapping[str, Sequence[str]]
    asked: list[str] = field(default_factory=list[str])
    """A name for each question about its IPv4 addresses."""
    address: str = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        labels, at = list[str](), 12
        while size := data[at]:
            labels.append(data[at + 1 : at + 1 + size].decode().lower())
            at += 1 + size
        name, (kind,) = ".".join(labels), struct.unpack_from("!H", data, at + 1)
        if kind == A:
            self.asked.append(name)
        if name.endswith(".silent"):
            return
        found = self.names.get(name, []) if kind == A else []
        code = 0 if name in self.names else NO_SUCH_NAME
        answers = [struct.pack("!HHHIH4s", 0xC00C, A, 1, 0, 4, IPv4Address(each).packed) for each in found]
        head = data[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, len(answers), 0, 0)
        self._transport.sendto(head + data[12 : at + 5] + b"".join(answers), addr)


@asynccontextmanager
async def naming(names: Mapping[str, Sequence[str]]) -> AsyncGenerator[NameServer]:
    """Answer on a free port until the block ends."""
    server = NameServer(names)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, ("127.0.0.1", 0))
    server.address = f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    try:
        yield server
    finally:
        transport.close()
