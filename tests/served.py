"""Runs the real application on a real port in a thread of its own, until a block ends."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvicorn
import uvloop

from serve_app.jobs.waits import JobWaits
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.support import until

T = TypeVar("T")


@dataclass(slots=True)
class Served:
    """A running service. What works on its jobs is a subclass's to say."""

    base_url: str = ""
    resources: Resources = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    _server: uvicorn.Server = field(init=False)
    _may_listen: asyncio.Event = field(default_factory=asyncio.Event)
    _is_ending: bool = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the stores on the service's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    @contextmanager
    def ingress_down(self) -> Generator[None]:
        """Nothing listens and every connection ends, until the block does; what works on jobs goes on."""
        old = self.resources
        self.resources = old.with_parts(waits=JobWaits(old.jobs, most=64, previews=old.previews))
        self.loop.call_soon_threadsafe(self._may_listen.clear)
        self.loop.call_soon_threadsafe(old.waits.end_all)  # as Serve lets a replica do
        server = self._server
        server.should_exit = True
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self._may_listen.set)
            until(lambda: self._server is not server)

    async def hint(self, kind: str, job_id: str) -> None:
        """A job was accepted."""

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[None]:
        """What runs together with the application."""
        yield

    async def serve(self, settings: Settings, ready: threading.Event) -> None:
        self.loop = asyncio.get_running_loop()
        self._may_listen.set()
        async with open_resources(settings, hint=self.hint) as self.resources, self.working():
            while not self._is_ending:
                port = int(self.base_url.rpartition(":")[2] or 0)
                with socket.create_server(("127.0.0.1", port)) as listening:
                    self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                    app = self.resources.app()
                    self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
                    ready.set()  # the socket listens already: an early connection waits in its queue
                    await self._server.serve(sockets=[listening])
                await self._may_listen.wait()

    def end(self) -> None:
        self._is_ending = True
        self._server.should_exit = True


S = TypeVar("S", bound=Served)


@contextmanager
def served(service: S, settings: Settings) -> Generator[S]:
    """Run the service on a free port until the block ends."""
    ready = threading.Event()
    thread = threading.Thread(target=lambda: uvloop.run(service.serve(settings, ready)), name="served")
    thread.start()
    try:
        assert ready.wait(60), "the service did not start"
        yield service
    finally:
        if ready.is_set():
            service.end()
        thread.join(30)
