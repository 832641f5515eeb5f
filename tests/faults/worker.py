"""A worker in a process of its own, without Ray, that dies or hangs where it is told to."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

from serve_app.domain.jobs import BeatReply, Claim, Lease
from serve_app.domain.requests import GenerationRequest
from serve_app.service.attempt import Pace
from serve_app.service.reap import reap_forever
from serve_app.service.resources import Resources, open_resources
from serve_app.service.work import Unhealthy, Worker
from serve_app.settings import Settings
from serve_app.stores.jobs import JobStore
from serve_app.stores.redis import Rewrite, connect
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
class Orders:
    """How one worker process is to behave. Everything here is a fault except `pace` and `drain_s`."""

    die: Point = "never"
    hangs: bool = False
    """Its first step never ends."""
    beats: bool = True
    is_fenced: bool = True
    reaps: bool = False
    device_rows: int = 0
    """Rows of 256x256 that fit its device; 0 is no limit."""
    is_device_lost: bool = False
    is_blind: bool = False
    """Its decoder gives no numbers."""
    is_log_full: bool = False
    """Its log is on a full disk."""
    clock_error: timedelta = timedelta()
    """How far its wall clock is ahead."""
    pace: Pace = field(default_factory=lambda: QUICK)
    drain_s: float = 5.0


QUICK = Pace(poll=timedelta(milliseconds=50), beat=timedelta(milliseconds=50))

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.forge", __name__])


def start_worker(settings: Settings, name: str, orders: Orders | None = None) -> BaseProcess:
    """Fork a worker from the loaded model; it begins to claim within a fraction of a second."""
    _heat_the_forge()
    fields = {name: getattr(settings, name) for name in settings.model_fields_set}
    process = _context.Process(target=_main, args=(fields, name, orders or Orders()), name=name, daemon=True)
    process.start()
    return process


@cache
def _heat_the_forge() -> None:
    """Once per run: torch and the model take seconds to load, minutes on a crowded machine, and no test may measure them."""
    first = _context.Process(target=_nothing, daemon=True)
    first.start()
    first.join()


def _nothing() -> None:
    """What the first process does."""


def _main(fields: dict[str, Any], name: str, orders: Orders) -> None:
    register_faulty()
    if orders.is_log_full:
        log_to_a_full_disk()
    with clock_off_by(orders.clock_error):
        asyncio.run(_work(Settings.model_validate(fields), name, orders))


async def _work(settings: Settings, name: str, orders: Orders) -> None:
    from deployments.generation_bench import GenerationBench  # the forked process has it; the test that forks need not
    from tests.faults.device import limit_memory, lose_device, spoil_decoder
    from tests.faults.forge import ENGINE

    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    async with open_resources(settings) as opened:
        resources = _tampered(opened, orders)
        if orders.device_rows:
            limit_memory(ENGINE, orders.device_rows, settings.data_dir / OUT_OF_MEMORY)
        if orders.is_device_lost:
            lose_device(ENGINE)
        if orders.is_blind:
            spoil_decoder(ENGINE)
        bench = TamperedBench(GenerationBench(ENGINE, resources), orders)
        worker = Worker(resources, cast(Any, bench), name=name, pace=orders.pace)
        worker.start()
        reaping = asyncio.create_task(_reap(resources, orders))
        await _until_unhealthy_or(leave, worker)
        reaping.cancel()
        await worker.drain(timedelta(seconds=orders.drain_s))


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


async def _reap(resources: Resources, orders: Orders) -> None:
    if orders.reaps:
        await reap_forever(resources, every=timedelta(milliseconds=100))


def _tampered(resources: Resources, orders: Orders) -> Resources:
    jobs = resources.jobs
    if not orders.is_fenced:
        jobs = JobStore(connect(resources.redis_url), resources.settings, rewrite=without_fence)
    if not orders.beats:
        jobs = _Silent(jobs)
    if orders.die == "half stored":
        os.fsync = lambda _file: os.kill(os.getpid(), signal.SIGKILL)  # the image is written, and not yet in place
    tampered_jobs = {"claimed": "claim", "finished": "finish"}.get(orders.die)
    return replace(
        resources,
        jobs=cast(JobStore, _Deadly(jobs, tampered_jobs) if tampered_jobs else jobs),
        images=cast(Any, _Deadly(resources.images, "put")) if orders.die == "stored" else resources.images,
    )


without_fence: Rewrite = lambda name, text: text.replace(  # noqa: E731 - a value of that type
    "return job and job.state == 'running' and job.attempt == attempt", "return job"
)


class _Deadly:
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


class _Silent:
    """A job store whose beats are never sent."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def beat(self, lease: Lease, *, progress: int) -> BeatReply:
        return BeatReply.OK


class TamperedBench:
    """A bench whose step kills its process or never ends; and a prompt that kills whoever draws it."""

    def __init__(self, bench: object, orders: Orders) -> None:
        self._bench = bench
        self._orders = orders
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench, name)

    async def start(self, claim: Claim, keys: Any) -> None:
        if isinstance(claim.request, GenerationRequest) and POISON in claim.request.prompt:
            die()
        await cast(Any, self._bench).start(claim, keys)

    def step(self) -> Any:
        self._steps += 1
        if self._orders.hangs:
            threading.Event().wait()
        if self._orders.die == "denoising" and self._steps > 2:
            die()
        return cast(Any, self._bench).step()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
