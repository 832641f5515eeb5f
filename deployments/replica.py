"""What every replica that works on jobs does for Serve: look when hinted, report its health, drain when it is stopped."""

import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta

from ray import serve

from deployments.args import WorkerArgs
from serve_app.log import configure_logging
from serve_app.service.bench import Bench
from serve_app.service.resources import Resources, open_resources
from serve_app.service.work import Worker
from serve_app.settings import Settings


class WorkReplica:
    """A worker on its own process, pulling jobs from Redis. Serve starts it, asks after it and stops it."""

    _worker: Worker | None = None

    async def open(self, args: WorkerArgs, set_up: Callable[[Resources], Awaitable[Bench]]) -> None:
        """Load the bench and begin to claim. Called once, from the constructor."""
        settings = Settings()
        configure_logging(settings.log_level)
        self._drain = timedelta(seconds=args.drain_s)
        self._stack = AsyncExitStack()
        resources = await self._stack.enter_async_context(open_resources(settings))
        worker = Worker(resources, await set_up(resources), name=_replica_name(), pace=args.pace)
        worker.start()
        self._worker = worker

    async def hint(self) -> None:
        """A job was accepted. May never come: the worker looks by itself too."""
        if self._worker is not None:
            self._worker.hint()

    async def check_health(self) -> None:
        if self._worker is not None:
            self._worker.check()

    async def __del__(self) -> None:
        """Awaited by Serve once no more hints are sent here; cut short by a kill at the graceful time's end."""
        if self._worker is None:
            return
        await self._worker.drain(self._drain)
        await self._stack.aclose()


def _replica_name() -> str:
    """Unique per process: a replaced replica must not pass for the one before it."""
    return f"{serve.get_replica_context().replica_tag}-{secrets.token_hex(4)}"
