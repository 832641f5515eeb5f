"""The one thread that takes a bench's steps; what it finishes reaches the event loop as futures."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from serve_app.service.bench import Bench, FinishedRun

log = logging.getLogger(__name__)

MAX_STRIKES = 3
"""Failed steps without an image between them after which the bench is called broken: by then it is not one job's fault.
A step that only clears lost runs away, or waits for an adapter, succeeds on a broken device too and proves nothing."""

CLEARING_S = 5.0
"""How long the event loop may take to take lost runs off the bench: until then they are not stepped again."""


class StepFailed(Exception):
    """A step raised: every run then on the bench is lost, and may well succeed elsewhere."""


class StepThread:
    """Steps the bench while it has work. Futures and callbacks belong to the event loop that `start` was called from."""

    def __init__(self, bench: Bench, *, on_finished: Callable[[], None]) -> None:
        self._bench = bench
        self._on_finished = on_finished
        self._expected: dict[str, asyncio.Future[FinishedRun]] = {}
        self._seconds: dict[str, float] = {}
        self._awake = threading.Event()
        self._closing = False
        self._step_began: float | None = None
        self._strikes = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=f"{self._bench.kind}-steps", daemon=True)
        self._thread.start()

    def expect(self, keys: Sequence[str]) -> list[asyncio.Future[FinishedRun]]:
        """Futures of runs that are about to be added: ask before adding, `forget` when done."""
        futures = [self._loop.create_future() for _ in keys]
        self._expected.update(zip(keys, futures, strict=True))
        return futures

    def wake(self) -> None:
        """The bench has new work."""
        self._awake.set()

    def forget(self, keys: Sequence[str]) -> None:
        """Runs nobody waits for any more leave the bench within one step."""
        for key in keys:
            self._seconds.pop(key, None)
            future = self._expected.pop(key, None)
            if future is not None and (future.cancelled() or not future.done()):
                self._bench.abort(key)
                future.cancel()

    def is_finished(self, key: str) -> bool:
        future = self._expected.get(key)
        return future is not None and future.done()

    def seconds(self, keys: Sequence[str]) -> float:
        """The bench's time these runs took: of each step, an equal share of those that were live."""
        return sum(self._seconds.get(key, 0.0) for key in keys)

    @property
    def step_age(self) -> timedelta:
        """How long the step in progress has taken; zero between steps."""
        began = self._step_began
        return timedelta(seconds=time.monotonic() - began) if began is not None else timedelta()

    @property
    def is_broken(self) -> bool:
        return self._strikes >= MAX_STRIKES or not self._thread.is_alive()

    async def close(self, within: timedelta) -> None:
        """No step begins after this; the last one gets `within` to end."""
        self._closing = True
        self._awake.set()
        await asyncio.to_thread(self._thread.join, within.total_seconds())

    def _run(self) -> None:
        while not self._closing:
            self._awake.clear()
            if not self._bench.has_work:
                self._awake.wait()
                continue
            error = self._step()
            if error is not None:
                self._give_up(error)

    def _step(self) -> Exception | None:
        """What went wrong with it."""
        live = self._bench.progress()
        began = self._step_began = time.monotonic()
        try:
            finished = self._bench.step()
        except Exception as error:  # noqa: BLE001 - the thread must outlive any step
            return error
        finally:
            self._step_began = None
            self._share_out(time.monotonic() - began, list(live))
        if any(run.image is not None for run in finished):
            self._strikes = 0
        if finished:
            self._call(self._deliver, finished)
        return None

    def _give_up(self, error: Exception) -> None:
        log.error("a step failed; every run on the %s bench starts over", self._bench.kind, exc_info=error)
        self._strikes += 1
        cleared = threading.Event()
        self._call(self._fail_all, error, cleared)
        cleared.wait(CLEARING_S)

    def _share_out(self, seconds: float, live: Sequence[str]) -> None:
        for key in live:
            if key in self._expected:
                self._seconds[key] = self._seconds.get(key, 0.0) + seconds / len(live)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, finished: Sequence[FinishedRun]) -> None:
        for run in finished:
            future = self._expected.get(run.key)
            if future is not None and not future.done():
                future.set_result(run)
        self._on_finished()

    def _fail_all(self, error: Exception, cleared: threading.Event) -> None:
        for key, future in self._expected.items():
            if not future.done():
                self._bench.abort(key)
                future.set_exception(StepFailed(type(error).__name__))
        cleared.set()
        self._on_finished()
