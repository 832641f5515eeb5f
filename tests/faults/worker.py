"""A worker in a process of its own, without Ray, that dies or hangs where a test wants it."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

import pytest

from serve_app.domain.jobs import Claim, HeartbeatReply, Lease
from serve_app.domain.requests import GenerationRequest
from serve_app.jobs.queue import JobQueue
from serve_app.operations.housekeeping import reap_forever
from serve_app.settings import Settings
from serve_app.store.redis_client import connect
from serve_app.worker.attempt import WorkerTiming
from serve_app.worker.worker import Unhealthy, Worker
from tests.composition import Resources, open_resources
from tests.faults.clock import clock_off_by
from tests.faults.log_disk import log_to_a_full_disk
from tests.faults.storage import register_faulty

POISON = "poison"
"""A prompt with this word kills the process that draws it."""
UNHEALTHY = 3
"""Exit status of a worker that called itself unhealthy, as a replica that Serve then replaces."""

OUT_OF_MEMORY = "out-of-memory"
"""The file in the data directory that tells of forward passes which did not fit."""

Point = Literal["never", "claimed", "denoising", "half stored", "stored", "finished"]


@dataclass(frozen=True, kw_only=True)
class WorkerBehavior:
    """How one worker process behaves. Everything here is a fault except `timing` and `drain_s`."""

    die: Point = "never"
    hangs: bool = False
    """Its first step never ends."""
    heartbeats: bool = True
    is_fenced: bool = True
    reaps: bool = False
    device_rows: int = 0
    """Rows of 256x256 that fit its device; 0 is no limit."""
    is_device_lost: bool = False
    decodes_nan: bool = False
    """Its decoder gives no numbers."""
    is_log_full: bool = False
    """Its log is on a full disk."""
    clock_error: timedelta = timedelta()
    """How far its wall clock is ahead."""
    timing: WorkerTiming = field(default_factory=lambda: QUICK)
    drain_s: float = 5.0


QUICK = WorkerTiming(poll=timedelta(milliseconds=50), heartbeat=timedelta(milliseconds=50))

FORKED_WORKERS = pytest.mark.xdist_group("forked workers")
"""Marks tests that start workers: the model, which takes 5 s of processor time, is then loaded once for all of them."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.preloaded_engine", __name__])


def start_worker(settings: Settings, name: str, behavior: WorkerBehavior | None = None) -> BaseProcess:
    """Fork a worker from the loaded model; it begins to claim within a fraction of a second."""
    _preload()
    fields = {name: getattr(settings, name) for name in settings.model_fields_set}
    process = _context.Process(target=_main, args=(fields, name, behavior or WorkerBehavior()), name=name, daemon=True)
    process.start()
    return process


@cache
def _preload() -> None:
    """Load torch and the model once per run.

    They take seconds to load, minutes on a crowded machine, and no test may measure them.
    """
    first = _context.Process(target=_nothing, daemon=True)
    first.start()
    first.join()


def _nothing() -> None:
    """What the first process does."""


def _main(fields: dict[str, Any], name: str, behavior: WorkerBehavior) -> None:
    register_faulty()
    if behavior.is_log_full:
        log_to_a_full_disk()
    with clock_off_by(behavior.clock_error):
        asyncio.run(_work(Settings.model_validate(fields), name, behavior))


async def _work(settings: Settings, name: str, behavior: WorkerBehavior) -> None:
    from serve_app.worker.generation import GenerationExecutor
    from tests.faults.device import limit_memory, lose_device, spoil_decoder
    from tests.faults.preloaded_engine import ENGINE

    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    async with open_resources(settings) as opened:
        resources = _tampered(opened, behavior)
        if behavior.device_rows:
            limit_memory(ENGINE, behavior.device_rows, settings.data_dir / OUT_OF_MEMORY)
        if behavior.is_device_lost:
            lose_device(ENGINE)
        if behavior.decodes_nan:
            spoil_decoder(ENGINE)
        executor = TamperedExecutor(
            GenerationExecutor(ENGINE, resources.catalog, resources.weights, resources.images), behavior
        )
        worker = Worker(resources.for_workers, cast(Any, executor), name=name, timing=behavior.timing)
        worker.start()
        reaping = asyncio.create_task(_reap(resources, behavior))
        await _until_unhealthy_or(leave, worker)
        reaping.cancel()
        await worker.drain(timedelta(seconds=behavior.drain_s))


async def _until_unhealthy_or(leave: asyncio.Event, worker: Worker) -> None:
    while not leave.is_set():
        try:
            worker.check()
        except Unhealthy:
            os._exit(UNHEALTHY)  # a hung step cannot be waited for
        try:
            async with asyncio.timeout(0.1):
                await leave.wait()
        except TimeoutError:
            continue


async def _reap(resources: Resources, behavior: WorkerBehavior) -> None:
    if behavior.reaps:
        await reap_forever(resources.for_housekeeping, every=timedelta(milliseconds=100))


def _tampered(resources: Resources, behavior: WorkerBehavior) -> Resources:
    queue = resources.queue
    if not behavior.is_fenced:
        queue = JobQueue(connect(resources.redis_url), resources.settings, rewrite=without_fence)
    if not behavior.heartbeats:
        queue = _WithoutHeartbeats(queue)
    if behavior.die == "half stored":
        os.fsync = lambda _file: os.kill(os.getpid(), signal.SIGKILL)  # the image is written, and not yet in place
    deadly_call = {"claimed": "claim", "finished": "finish"}.get(behavior.die)
    return resources.with_parts(
        queue=cast(JobQueue, _DiesAfter(queue, deadly_call) if deadly_call else queue),
        images=cast(Any, _DiesAfter(resources.images, "put")) if behavior.die == "stored" else resources.images,
    )


def without_fence(name: str, text: str) -> str:
    """Every script with `holds_lease` true for any job."""
    return text.replace("return job and job.state == 'running' and job.attempt == attempt", "return job")


class _DiesAfter:
    """Everything of `inner`; after `method` has answered with something, the process is gone."""

    def __init__(self, inner: object, method: str) -> None:
        self._inner = inner
        self._method = method

    def __getattr__(self, name: str) -> Any:
        found: Callable[..., Any] = getattr(self._inner, name)
        if name != self._method:
            return found

        async def and_die(*args: Any, **options: Any) -> Any:
            answer = await found(*args, **options)
            if answer:
                die()
            return answer

        return and_die


class _WithoutHeartbeats:
    """A job queue whose heartbeats are never sent."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def heartbeats(self, progress: Mapping[Lease, int]) -> list[str]:
        return [HeartbeatReply.OK for _ in progress]


class TamperedExecutor:
    """An executor whose step kills its process or never ends; and a prompt that kills whoever draws it."""

    def __init__(self, executor: object, behavior: WorkerBehavior) -> None:
        self._executor = executor
        self._orders = behavior
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    async def start(self, claim: Claim, run_ids: Any) -> None:
        if isinstance(claim.request, GenerationRequest) and POISON in claim.request.prompt:
            die()
        await cast(Any, self._executor).start(claim, run_ids)

    def step(self) -> Any:
        self._steps += 1
        if self._orders.hangs:
            threading.Event().wait()
        if self._orders.die == "denoising" and self._steps > 2:
            die()
        return cast(Any, self._executor).step()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
