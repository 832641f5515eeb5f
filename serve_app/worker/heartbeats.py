"""Keeps the leases of all attempts of a worker, in one call, and learns which of them are lost."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

from serve_app.domain.jobs import HeartbeatReply, Lease
from serve_app.jobs.queue import JobQueue
from serve_app.worker.step_thread import StepThread


class Heartbeats:
    """Tells each attempt when its lease is lost. `send` is to be called again and again."""

    def __init__(self, queue: JobQueue, steps: StepThread, *, step_limit: timedelta) -> None:
        self._queue = queue
        self._steps = steps
        self._step_limit = step_limit
        self._held: dict[Lease, tuple[Callable[[], int], asyncio.Future[str]]] = {}

    async def until_lost(self, lease: Lease, progress: Callable[[], int]) -> str:
        """Keep a lease, with its job's `progress` in percent; return the first reply that is not `OK`."""
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._held[lease] = progress, lost
        try:
            return await lost
        finally:
            del self._held[lease]

    async def send(self) -> None:
        """Extend every lease, unless a step hangs, which must not keep its jobs from another worker.

        Raises `StoreUnavailable`.
        """
        held = dict(self._held)
        if not held or self._steps.step_age > self._step_limit:
            return
        replies = await self._queue.heartbeats({lease: progress() for lease, (progress, _) in held.items()})
        for (_, lost), reply in zip(held.values(), replies, strict=True):
            if reply != HeartbeatReply.OK and not lost.done():
                lost.set_result(reply)
