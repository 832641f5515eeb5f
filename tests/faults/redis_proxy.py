"""A TCP proxy to Redis on loopback that delays, drops, breaks, loses a reply, or ends at a request."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

CHUNK = 1 << 16


class RedisProxy:
    """`url` leads to the server through this proxy. Faults hold for open connections and for new ones."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._open = asyncio.Event()
        self._open.set()
        self._is_refusing = False
        self._delay_s = 0.0
        self._lose_reply_to: bytes | None = None
        self._refuse_from: bytes | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.lost_replies = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def blackhole(self) -> None:
        """Nothing passes any more, and connections stay open."""
        self._open.clear()

    def refuse(self) -> None:
        """Connections break, and new ones at once."""
        self._is_refusing = True
        for writer in self._writers:
            writer.transport.abort()

    def reset(self) -> None:
        """Open connections end by RST, as when a machine comes back; new ones pass."""
        for writer in self._writers:
            end = writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def slow(self, seconds: float) -> None:
        """Every reply comes this much later."""
        self._delay_s = seconds

    def lose_reply_to(self, words: str) -> None:
        """Break the connection of the next request that holds `words`, before its reply passes.

        The request reaches the server.
        """
        self._lose_reply_to = words.encode()

    def refuse_from(self, words: str) -> None:
        """Refuse from the next request on that holds `words`, which does not reach the server."""
        self._refuse_from = words.encode()

    def heal(self) -> None:
        self._is_refusing = False
        self._refuse_from = None
        self._delay_s = 0.0
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self._is_refusing:
                return
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # the other side is gone, or the test is over
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
        is_marked = asyncio.Event()
        pumps = {
            asyncio.create_task(self._requests(reader, server_writer, is_marked)),
            asyncio.create_task(self._replies(server_reader, writer, is_marked)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            with contextlib.suppress(OSError):
                server_writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, is_marked: asyncio.Event
    ) -> None:
        while chunk := await reader.read(CHUNK):
            await self._open.wait()
            if self._refuse_from is not None and self._refuse_from in chunk:
                self.refuse()
                return
            if self._lose_reply_to is not None and self._lose_reply_to in chunk:
                self._lose_reply_to = None
                is_marked.set()
            server.write(chunk)
            await server.drain()

    async def _replies(
        self, server: asyncio.StreamReader, writer: asyncio.StreamWriter, is_marked: asyncio.Event
    ) -> None:
        while chunk := await server.read(CHUNK):
            if is_marked.is_set():
                self.lost_replies += 1
                return
            await asyncio.sleep(self._delay_s)
            await self._open.wait()
            writer.write(chunk)
            await writer.drain()


@asynccontextmanager
async def proxy_to(unix_url: str) -> AsyncGenerator[RedisProxy]:
    """Open a proxy to the server of a `unix://` URL."""
    proxy = RedisProxy(unix_url.removeprefix("unix://"))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
