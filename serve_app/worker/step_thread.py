"""Calls an executor's steps on a thread; its finished runs reach the event loop as futures."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from serve_app.worker.executor import Executor, FinishedRun

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""After this many failed steps without an image between them the executor counts as broken: one job cannot be the
cause. A step that only removes lost runs, or waits for an adapter, succeeds on a broken device too and does not
count."""

ABORT_WAIT_S = 5.0
"""The event loop may take this many seconds to abort lost runs: until then no step is taken."""


class StepFailed(Exception):
    """A step raised: every live run of the executor is lost, and may succeed on another replica."""


class StepThread:
    """Calls the executor's steps while it has work. Futures and callbacks run on the event loop that called `start`."""

    def __init__(self, executor: Executor, *, on_finished: Callable[[], None]) -> None:
        """Have the event loop call `on_finished` when runs have ended, or have made place for others."""
        self._executor = executor
        self._on_finished = on_finished
        self._expected: dict[str, asyncio.Future[FinishedRun]] = {}
        self._seconds: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._awake = threading.Event()
        self._closing = False
        self._step_began: float | None = None
        self._failed_steps = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=f"{self._executor.pool}-steps", daemon=True)
        self._thread.start()

    def expect(self, run_ids: Sequence[str], work: float = 1.0) -> list[asyncio.Future[FinishedRun]]:
        """Return futures of runs that are about to be added: call it before adding, `forget` when done.

        Live runs share the time of a step in proportion to the `work` of each.
        """
        futures = [self._loop.create_future() for _ in run_ids]
        self._shares.update(dict.fromkeys(run_ids, work))
        self._expected.update(zip(run_ids, futures, strict=True))
        return futures

    def wake(self) -> None:
        """Tell the thread that the executor has new work."""
        self._awake.set()

    def forget(self, run_ids: Sequence[str]) -> None:
        """Drop runs that are no longer awaited; they leave the executor within one step."""
        for run_id in run_ids:
            self._seconds.pop(run_id, None)
            self._shares.pop(run_id, None)
            future = self._expected.pop(run_id, None)
            if future is not None and (future.cancelled() or not future.done()):
                self._executor.abort(run_id)
                future.cancel()

    def is_finished(self, run_id: str) -> bool:
        future = self._expected.get(run_id)
        return future is not None and future.done()

    def seconds(self, run_ids: Sequence[str]) -> float:
        """Return these runs' share of the time of steps, in seconds."""
        return sum(self._seconds.get(run_id, 0.0) for run_id in run_ids)

    @property
    def step_age(self) -> timedelta:
        """Return how long the step in progress has taken; zero between steps."""
        began = self._step_began
        return timedelta(seconds=time.monotonic() - began) if began is not None else timedelta()

    @property
    def is_broken(self) -> bool:
        return self._failed_steps >= MAX_FAILED_STEPS or not self._thread.is_alive()

    async def close(self, within: timedelta) -> None:
        """Begin no more steps; wait up to `within` for the last one."""
        self._closing = True
        self._awake.set()
        await asyncio.to_thread(self._thread.join, within.total_seconds())

    def _run(self) -> None:
        while True:
            self._awake.clear()
            if self._closing:  # looked at after `clear`, which may have hidden the wake of `close`
                return
            if not self._executor.has_work:
                self._awake.wait()
                continue
            error = self._step()
            if error is not None:
                self._fail_live_runs(error)

    def _step(self) -> Exception | None:
        """Call one step; return its error."""
        live, free = self._executor.progress(), self._executor.free_runs
        began = self._step_began = time.monotonic()
        try:
            finished = self._executor.step()
        except Exception as error:  # noqa: BLE001 - the thread must outlive any step
            return error
        finally:
            self._step_began = None
            self._add_seconds(time.monotonic() - began, list(live))
        if any(run.image is not None for run in finished):
            self._failed_steps = 0
        if finished:
            self._call(self._deliver, finished)
        elif self._executor.free_runs > free:
            self._call(self._on_finished)
        return None

    def _fail_live_runs(self, error: Exception) -> None:
        log.error("a step failed; every run of the %s executor starts over", self._executor.pool, exc_info=error)
        self._failed_steps += 1
        cleared = threading.Event()
        self._call(self._fail_all, error, cleared)
        cleared.wait(ABORT_WAIT_S)

    def _add_seconds(self, seconds: float, live: Sequence[str]) -> None:
        shares = {run_id: share for run_id in live if (share := self._shares.get(run_id))}
        whole = sum(shares.values())
        for run_id, share in shares.items():
            self._seconds[run_id] = self._seconds.get(run_id, 0.0) + seconds * share / whole

    def _call(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, finished: Sequence[FinishedRun]) -> None:
        for run in finished:
            future = self._expected.get(run.run_id)
            if future is not None and not future.done():
                future.set_result(run)
        self._on_finished()

    def _fail_all(self, error: Exception, cleared: threading.Event) -> None:
        for run_id, future in self._expected.items():
            if not future.done():
                self._executor.abort(run_id)
                future.set_exception(StepFailed(type(error).__name__))
        cleared.set()
        self._on_finished()
