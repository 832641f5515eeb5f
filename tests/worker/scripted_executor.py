"""An executor without a model, whose runs end as the test says."""

import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Literal, NamedTuple

import numpy as np

from serve_app.domain.jobs import Claim, Failure, JobKind, JobState, Unread
from serve_app.jobs.queue import JobQueue
from serve_app.store.redis_client import connect
from serve_app.store.script import Rewrite
from serve_app.worker.attempt import WorkerTiming
from serve_app.worker.executor import Executor, Pixels
from serve_app.worker.worker import Unhealthy, Worker
from tests.composition import Resources
from tests.made_jobs import job_of
from tests.support import wait_until

QUICK = WorkerTiming(poll=timedelta(milliseconds=20), heartbeat=timedelta(milliseconds=20))
Result = Failure | Literal["image", "nothing", "hang"]


class ScriptedRun(NamedTuple):
    run_id: str
    image: Pixels | None
    failure: Failure | None = None
    decode_seconds: float = 0.0
    unread: Unread = Unread(7, 0)


class ScriptedExecutor(Executor):
    """Ends its runs with `results`, one after the other, then with images.

    A run that hangs stays until it is aborted.
    """

    pool = JobKind.GENERATION

    def __init__(self, *results: Result) -> None:
        self._results = list(results)
        self._runs: dict[str, Result] = {}
        self._lock = threading.Lock()
        self.start_errors: list[Exception] = []
        """Raised by `start`, one a call."""
        self.resident_errors: list[Exception] = []
        """Raised by `resident`, one a call."""
        self.aborted: list[str] = []

    @property
    def free_runs(self) -> int:
        return 8

    @property
    def resident(self) -> Sequence[str]:
        if self.resident_errors:
            raise self.resident_errors.pop()
        return ()

    @property
    def has_work(self) -> bool:
        with self._lock:
            return any(result != "hang" for result in self._runs.values())

    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        if self.start_errors:
            raise self.start_errors.pop()
        with self._lock:
            for run_id in run_ids:
                self._runs[run_id] = self._results.pop(0) if self._results else "image"

    def step(self) -> Sequence[ScriptedRun]:
        with self._lock:
            ending: dict[str, Result] = {run_id: result for run_id, result in self._runs.items() if result != "hang"}
            for run_id in ending:
                del self._runs[run_id]
        return [_ended(run_id, result) for run_id, result in ending.items()]

    def abort(self, run_id: str) -> bool:
        with self._lock:
            self.aborted.append(run_id)
            return self._runs.pop(run_id, None) is not None

    def progress(self) -> Mapping[str, tuple[int, int]]:
        with self._lock:
            return dict.fromkeys(self._runs, (1, 2))


def _ended(run_id: str, result: Result) -> ScriptedRun:
    if isinstance(result, Failure):
        return ScriptedRun(run_id, None, result)
    return ScriptedRun(run_id, np.zeros((8, 8, 3), np.uint8) if result == "image" else None)


@asynccontextmanager
async def working(
    resources: Resources, executor: Executor, *, name: str = "", timing: WorkerTiming = QUICK
) -> AsyncGenerator[Worker]:
    worker = Worker(resources.for_workers, executor, name=name or f"worker-{id(executor)}", timing=timing)
    worker.start()
    try:
        yield worker
    finally:
        await worker.drain(timedelta(seconds=2.5))


def with_queue(resources: Resources, rewrite: Rewrite) -> Resources:
    """Return the same stores, with a planted defect in the queue's scripts."""
    return resources.with_parts(queue=JobQueue(connect(resources.redis_url), resources.settings, rewrite=rewrite))


def is_unhealthy(worker: Worker) -> bool:
    try:
        worker.check()
    except Unhealthy:
        return True
    return False


async def until(
    resources: Resources,
    job_id: str,
    state: JobState,
    *,
    attempt: int = 1,
    timeout: float = 30,  # noqa: ASYNC109
) -> None:
    async def is_there() -> bool:
        job = await job_of(resources, job_id)
        return (job.state, job.attempt) == (state, attempt)

    await wait_until(is_there, timeout)
