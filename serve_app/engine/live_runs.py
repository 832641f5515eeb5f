"""Where each live run is: waiting, running or decoding. Any thread may add, abort and ask; the step thread moves them on."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from serve_app.engine.run import Run, RunRequest


class Waiting(NamedTuple):
    request: RunRequest
    since: float


class Decoding(NamedTuple):
    run: Run
    image: Future[np.ndarray]


class LiveRuns:
    """A run that is aborted is gone at once, but for the step thread, which may hold it until it asks `take_aborted`."""

    def __init__(self) -> None:
        self._news = threading.Condition()  # guards the four below
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        self._running: dict[str, Run] = {}
        self._aborted: list[Run] = []
        self._decoding: dict[str, Decoding] = {}

    # -- any thread ------------------------------------------------------------------------------------------------

    def add(self, request: RunRequest) -> None:
        """Raises ValueError on a key that is live."""
        with self._news:
            if request.key in self._waiting or request.key in self._running or request.key in self._decoding:
                raise ValueError(f"a run with the key {request.key!r} is live")
            self._waiting[request.key] = Waiting(request, time.monotonic())
            self._news.notify_all()

    def abort(self, key: str) -> bool:
        with self._news:
            if key in self._running:
                self._aborted.append(self._running.pop(key))
                return True
            return (self._waiting.pop(key, None) or self._decoding.pop(key, None)) is not None

    def wake(self) -> None:
        """There is something new: an adapter has been read, an image decoded."""
        with self._news:
            self._news.notify_all()

    @property
    def any(self) -> bool:
        with self._news:
            return bool(self._waiting or self._running or self._aborted or self._decoding)

    @property
    def to_denoise(self) -> int:
        """How many wait or run."""
        with self._news:
            return len(self._waiting) + len(self._running)

    def progress(self) -> dict[str, tuple[int, int]]:
        """(steps done, steps in all) by key."""
        with self._news:
            waiting = {key: (0, it.request.steps) for key, it in self._waiting.items()}
            started = [*self._running.values(), *(decoding.run for decoding in self._decoding.values())]
            return waiting | {run.request.key: (run.step, run.request.steps) for run in started}

    # -- the step thread -------------------------------------------------------------------------------------------

    def waiting(self) -> list[Waiting]:
        """In the order they came."""
        with self._news:
            return list(self._waiting.values())

    def start(self, waiting: Waiting, run: Run) -> bool:
        """A waiting run begins. False when it was aborted meanwhile."""
        with self._news:
            if not self._drop(waiting):
                return False
            self._running[run.request.key] = run
            return True

    def drop(self, waiting: Waiting) -> bool:
        """A waiting run will not begin. False when it was aborted, and nobody wants to hear of it."""
        with self._news:
            return self._drop(waiting)

    def end(self, run: Run) -> bool:
        """A running run will not go on. False when it was aborted."""
        with self._news:
            return self._end(run)

    def decode(self, run: Run, start: Callable[[], Future[np.ndarray]]) -> None:
        """A run has made its last step: `start` begins to decode it, unless it was aborted."""
        with self._news:
            if not self._end(run):
                return
            image = start()
            self._decoding[run.request.key] = Decoding(run, image)
        image.add_done_callback(lambda _: self.wake())

    def take_aborted(self) -> list[Run]:
        with self._news:
            aborted, self._aborted = self._aborted, []
            return aborted

    def take_decoded(self, *, within_s: float) -> list[Decoding]:
        """Those that are decoded by now. When there are none, waits once for any news."""
        with self._news:
            if within_s and not any(decoding.image.done() for decoding in self._decoding.values()):
                self._news.wait(within_s)
            ready = [decoding for decoding in self._decoding.values() if decoding.image.done()]
            for decoding in ready:
                del self._decoding[decoding.run.request.key]
            return ready

    def _drop(self, waiting: Waiting) -> bool:
        key = waiting.request.key
        if self._waiting.get(key) is not waiting:
            return False
        del self._waiting[key]
        return True

    def _end(self, run: Run) -> bool:
        if run in self._aborted:
            self._aborted.remove(run)
            return False
        del self._running[run.request.key]
        return True
