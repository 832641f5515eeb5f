"""Holds the state of every live run (waiting, running or decoding), and makes its outcome an image or a named failure.

Any thread adds, aborts and reads; the step thread moves them on.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.engine.adapters.layer_table import UnusableAdapter
from serve_app.engine.device import OUT_OF_MEMORY_MESSAGE, is_out_of_memory
from serve_app.engine.run import Conditioning, Finished, Run, RunRequest


@dataclass(eq=False, slots=True)
class PendingRun:
    """A run that waits for its adapter, its encoded prompt and a place in the batch."""

    request: RunRequest
    added_at: float
    conditioning: Conditioning | None = None
    error: Exception | None = None
    """Why it cannot be encoded."""


class Decoding(NamedTuple):
    run: Run
    image: Future[np.ndarray]


class LiveRuns:
    """The live runs by id. An aborted run leaves at once; the step thread may use it until it calls `pop_aborted`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields below, notified of every change; reentrant
        self._changes = 0
        self._waiting: OrderedDict[str, PendingRun] = OrderedDict()
        self._running: dict[str, Run] = {}
        self._aborted: list[Run] = []
        self._decoding: dict[str, Decoding] = {}

    # -- any thread ------------------------------------------------------------------------------------------------

    def add(self, request: RunRequest) -> None:
        """Add a run that waits. Raises ValueError when its id is that of a live run."""
        with self._changed:
            if request.run_id in self._waiting or request.run_id in self._running or request.run_id in self._decoding:
                raise ValueError(f"a run with the id {request.run_id!r} is live")
            self._waiting[request.run_id] = PendingRun(request, time.monotonic())
            self.wake()

    def abort(self, run_id: str) -> bool:
        with self._changed:
            if run_id in self._running:
                self._aborted.append(self._running.pop(run_id))
                return True
            return (self._waiting.pop(run_id, None) or self._decoding.pop(run_id, None)) is not None

    def wake(self) -> None:
        """Wake a waiting `wait_for_change`: an adapter has been read, a prompt encoded or an image decoded."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    @property
    def changes(self) -> int:
        """Return how often a run was added or `wake` called."""
        with self._changed:
            return self._changes

    def wait_for_change(self, since: int, *, within_s: float) -> None:
        """Wait until there were more than `since` changes, or an image is decoded."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != since or self._decoded(), within_s)

    @property
    def any(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._running or self._aborted or self._decoding)

    @property
    def rows(self) -> list[int]:
        """How many rows each run that is not denoised takes next; one that waits may take two."""
        with self._changed:
            return [2] * len(self._waiting) + [run.rows for run in self._running.values()]

    def progress(self) -> dict[str, tuple[int, int]]:
        """(steps done, steps in all) by run id; one that begins late has fewer in all once it has started."""
        with self._changed:
            waiting = {run_id: (0, it.request.steps) for run_id, it in self._waiting.items()}
            started = [*self._running.values(), *(decoding.run for decoding in self._decoding.values())]
            return waiting | {run.request.run_id: (run.steps_done, run.schedule.steps) for run in started}

    def running(self, run_id: str) -> Run | None:
        with self._changed:
            return self._running.get(run_id)

    def waiting(self) -> list[PendingRun]:
        """Waiting runs in the order of their arrival."""
        with self._changed:
            return list(self._waiting.values())

    # -- the step thread -------------------------------------------------------------------------------------------

    def start(self, waiting: PendingRun, run: Run) -> bool:
        """Move a waiting run to running. False when it was aborted meanwhile."""
        with self._changed:
            if not self.drop(waiting):
                return False
            self._running[run.request.run_id] = run
            return True

    def drop(self, waiting: PendingRun) -> bool:
        """Remove a waiting run that cannot start. False when it was aborted meanwhile."""
        run_id = waiting.request.run_id
        with self._changed:
            if self._waiting.get(run_id) is not waiting:
                return False
            del self._waiting[run_id]
            return True

    def end(self, run: Run) -> bool:
        """Remove a running run that failed. False when it was aborted meanwhile."""
        with self._changed:
            if run in self._aborted:
                self._aborted.remove(run)
                return False
            del self._running[run.request.run_id]
            return True

    def start_decoding(self, run: Run, start: Callable[[], Future[np.ndarray]]) -> None:
        """Move a run to decoding, which `start` begins, unless the run was aborted meanwhile."""
        with self._changed:
            if not self.end(run):
                return
            image = start()
            self._decoding[run.request.run_id] = Decoding(run, image)
        image.add_done_callback(lambda _: self.wake())

    def pop_aborted(self) -> list[Run]:
        with self._changed:
            aborted, self._aborted = self._aborted, []
            return aborted

    def pop_decoded(self) -> list[Decoding]:
        with self._changed:
            ready = self._decoded()
            for decoding in ready:
                del self._decoding[decoding.run.request.run_id]
            return ready

    def _decoded(self) -> list[Decoding]:
        return [decoding for decoding in self._decoding.values() if decoding.image.done()]


def outcome_of_decoding(run: Run, image: Future[np.ndarray]) -> Finished:
    error = image.exception()
    if error is not None:
        return failure_outcome(run.request.run_id, run.added_at, error)
    now = time.monotonic()
    return Finished(run.request.run_id, image.result(), None, now - run.added_at, now - run.denoised_at, run.unread)


def failure_outcome(run_id: str, added_at: float, error: BaseException) -> Finished:
    """Return the outcome of a run that failed with `error`; raise an AcceleratorError, since the device failed then."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return Finished(run_id, None, _failure(error), time.monotonic() - added_at)


def _failure(error: BaseException) -> Failure:
    if is_out_of_memory(error):
        return Failure(code=FailureCode.OUT_OF_MEMORY, message=OUT_OF_MEMORY_MESSAGE)
    if isinstance(error, UnusableAdapter):
        return Failure(code=FailureCode.LORA_UNAVAILABLE, message=str(error))
    if isinstance(error, OSError):  # the text of the error itself has the path
        return Failure(
            code=FailureCode.LORA_UNAVAILABLE, message=f"the adapter's weights cannot be read: {error.strerror}"
        )
    if isinstance(error, (ValueError, FloatingPointError)):
        return Failure(code=FailureCode.GENERATION_FAILED, message=str(error))
    return Failure(code=FailureCode.GENERATION_FAILED, message=f"making the image failed: {type(error).__name__}")
