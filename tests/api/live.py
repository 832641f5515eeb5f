"""The house behind a real HTTP server, with a worker at work, for clients that bring their own event loop."""

import asyncio
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from serve_app.api.app import create_app
from serve_app.domain.jobs import JobKind
from serve_app.service.resources import open_resources
from serve_app.settings import Settings
from serve_app.stores.embedded import stop_redis
from tests.api.house import House, Member, client_of
from tests.support import wait_until


@dataclass(frozen=True, slots=True)
class LiveHouse:
    base_url: str
    member: Member


@contextmanager
def serve_house(settings: Settings) -> Generator[LiveHouse]:
    """The application on a free port of this machine, in a thread of its own, with one roomy account."""
    up, down = threading.Event(), threading.Event()
    found: list[LiveHouse] = []

    async def serve() -> None:
        async with open_resources(settings) as resources:
            app = create_app(resources)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                house = House(resources, client_of(app))
                member = await house.member()
                found.append(LiveHouse(f"http://127.0.0.1:{listener.getsockname()[1]}", member))
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                await wait_until(lambda: server.started or serving.done())
                up.set()
                while not down.is_set():
                    done = [await house.work_once(kind) for kind in JobKind]
                    await asyncio.sleep(0 if any(done) else 0.05)
                server.should_exit = True
                await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="live house")
    thread.start()
    try:
        assert up.wait(60), "the server did not start"
        yield found[0]
    finally:
        down.set()
        thread.join(30)
        stop_redis(settings.data_dir)
