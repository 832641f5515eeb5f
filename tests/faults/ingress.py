"""The application in a process of its own that dies around an accept."""

import asyncio
import multiprocessing
import os
import signal
import socket
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

import uvicorn

from serve_app.api.app import create_app
from serve_app.service.resources import open_resources
from serve_app.settings import Settings
from serve_app.stores.jobs import Acceptance, JobStore

Moment = Literal["before accept", "after accept"]

_context = multiprocessing.get_context("spawn")


def start_ingress(settings: Settings, listening: int, moment: Moment) -> BaseProcess:
    """Serve on a socket that listens already; the first accept kills the process."""
    fields = {name: getattr(settings, name) for name in settings.model_fields_set}
    sock = socket.socket(fileno=os.dup(listening))
    process = _context.Process(target=_main, args=(fields, sock, moment), daemon=True)
    process.start()
    sock.close()
    return process


def _main(fields: dict[str, Any], listening: socket.socket, moment: Moment) -> None:
    asyncio.run(_serve(Settings.model_validate(fields), listening, moment))


async def _serve(settings: Settings, listening: socket.socket, moment: Moment) -> None:
    async with open_resources(settings) as opened:
        resources = replace(opened, jobs=cast(JobStore, _Dying(opened.jobs, moment)))
        server = uvicorn.Server(uvicorn.Config(create_app(resources), log_level="warning", lifespan="off"))
        await server.serve(sockets=[listening])


class _Dying:
    """A job store whose process ends right before or right after it has accepted a job."""

    def __init__(self, jobs: JobStore, moment: Moment) -> None:
        self._jobs = jobs
        self._moment = moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    async def accept(self, **request: Any) -> Acceptance:
        if self._moment == "before accept":
            _die()
        await self._jobs.accept(**request)
        return _die()


def _die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
