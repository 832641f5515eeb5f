"""The whole service in one process and on a real port: application, engine, upscaler and workers. No Ray."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import uvicorn

from serve_app.api.app import create_app
from serve_app.domain.jobs import JobKind
from serve_app.engine import Engine, EngineOptions
from serve_app.executors.generation import GenerationExecutor
from serve_app.executors.upscale import UpscaleExecutor
from serve_app.service.resources import Resources, open_resources
from serve_app.service.worker import Worker
from serve_app.settings import Settings
from serve_app.stores.sign_in_links import LinkPurpose
from serve_app.upscale.upscaler import Upscaler
from tests.support import POCKET

ACCOUNT, PASSWORD = "demo", "correct horse battery"
OPERATOR = "alice"
T = TypeVar("T")


@dataclass(slots=True)
class Site:
    """A running service with one account."""

    base_url: str
    resources: Resources
    loop: asyncio.AbstractEventLoop

    def sign_in_url(self) -> str:
        """Signs the account in, once."""

        async def make() -> str:
            account = await self.resources.accounts.get(ACCOUNT)
            assert account is not None
            return await self.resources.sign_in_links.create(account.id, LinkPurpose.SIGN_IN)

        return f"{self.base_url}/console/links/{self.run(make())}"

    def operator_url(self) -> str:
        """Signs the operator in, once."""
        token = self.run(self.resources.operator_links.create(OPERATOR, LinkPurpose.SIGN_IN))
        return f"{self.base_url}/operators/links/{token}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the service's stores."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextmanager
def open_site(settings: Settings) -> Generator[Site]:
    """Run the service on a free port until the block ends."""
    started: list[Site] = []
    ready, stopping = threading.Event(), list[Callable[[], None]]()

    async def serve() -> None:
        workers: list[Worker] = []

        async def hint(_kind: JobKind, _job_id: str) -> None:
            for worker in workers:
                worker.hint()

        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with open_resources(settings, hint=hint) as resources:
                await resources.accounts.create(ACCOUNT, password=PASSWORD, plan_a="enterprise", plan_b="premium")
                await resources.operators.create(OPERATOR)
                engine = Engine.load({"pocket": POCKET}, EngineOptions(device="cpu", max_rows=16, exact=False))
                upscaler = Upscaler.load(POCKET / "upscaler", device="cpu")
                for executor in (GenerationExecutor(engine, resources), UpscaleExecutor(upscaler, resources)):
                    workers.append(Worker(resources, executor, name=executor.kind))
                    workers[-1].start()
                server = uvicorn.Server(uvicorn.Config(create_app(resources), log_level="warning", lifespan="off"))
                address = f"http://127.0.0.1:{listening.getsockname()[1]}"
                started.append(Site(address, resources, asyncio.get_running_loop()))
                stopping.append(lambda: setattr(server, "should_exit", True))
                ready.set()
                await server.serve(sockets=[listening])
                for worker in workers:
                    await worker.drain(timedelta(seconds=2))

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="site")
    thread.start()
    try:
        assert ready.wait(60), "the service did not start"
        yield started[0]
    finally:
        for stop in stopping:
            stop()
        thread.join(30)
