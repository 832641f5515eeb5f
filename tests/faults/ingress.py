"""The application in a process of its own, which dies around an accept or cannot write its log."""

import asyncio
import multiprocessing
import os
import signal
import socket
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

import uvicorn

from serve_app.domain.jobs import NewJob
from serve_app.jobs.acceptance import Acceptance
from serve_app.jobs.queue import JobQueue
from serve_app.settings import Settings
from tests.composition import open_resources
from tests.faults.log_disk import log_to_a_full_disk

Fault = Literal["dies before accept", "dies after accept", "log disk full"]

_context = multiprocessing.get_context("spawn")


def start_ingress(settings: Settings, listening: int, fault: Fault) -> BaseProcess:
    """Serve on a socket that listens already. A process that is to die does so at its first accept."""
    fields = {name: getattr(settings, name) for name in settings.model_fields_set}
    sock = socket.socket(fileno=os.dup(listening))
    process = _context.Process(target=_main, args=(fields, sock, fault), daemon=True)
    process.start()
    sock.close()
    return process


def _main(fields: dict[str, Any], listening: socket.socket, fault: Fault) -> None:
    if fault == "log disk full":
        log_to_a_full_disk()
    asyncio.run(_serve(Settings.model_validate(fields), listening, fault))


async def _serve(settings: Settings, listening: socket.socket, fault: Fault) -> None:
    async with open_resources(settings) as resources:
        if fault != "log disk full":
            resources = resources.with_parts(queue=cast(JobQueue, _Dying(resources.queue, fault)))
        server = uvicorn.Server(uvicorn.Config(resources.app(), log_level="warning", lifespan="off"))
        await server.serve(sockets=[listening])


class _Dying:
    """A job queue whose process ends right before or right after it has accepted a job."""

    def __init__(self, queue: JobQueue, fault: Fault) -> None:
        self._queue = queue
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def accept(self, new: NewJob) -> Acceptance:
        if self._fault == "dies before accept":
            _die()
        await self._queue.accept(new)
        return _die()


def _die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
