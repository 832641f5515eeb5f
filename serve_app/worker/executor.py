"""The protocol of executors, which run a worker's jobs: the engine's and the upscaler's."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Claim, Failure, JobKind
from serve_app.domain.metrics import MemoryUse, Metric
from serve_app.store.measures import Measures

Pixels = NDArray[np.uint8]
"""An image of shape [height, width, 3], RGB."""


class FinishedRun(Protocol):
    """Result of a run: an image, or the failure."""

    @property
    def run_id(self) -> str: ...
    @property
    def image(self) -> Pixels | None: ...
    @property
    def failure(self) -> Failure | None: ...
    @property
    def decode_seconds(self) -> float:
        """Return the seconds from the last step to the pixels."""
        ...


class StartError(AtelierError):
    """A claim's runs cannot start.

    `failure` goes into the job's record; `retry` says whether another attempt may help.
    """

    def __init__(self, failure: Failure, *, retry: bool) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry = retry


class Executor(Protocol):
    """Runs jobs.

    `step` blocks for one step and is called from one thread; `start` is awaited on the event loop; all else returns at
    once and may be called from any thread.
    """

    @property
    def kind(self) -> JobKind: ...

    @property
    def free_runs(self) -> int:
        """Return how many more runs could start now."""
        ...

    @property
    def resident(self) -> Sequence[str]:
        """Return the groups (adapters) whose weights are in memory: their jobs wait for no file."""
        ...

    @property
    def has_work(self) -> bool: ...

    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        """Fetch what the claim needs, then add its runs, one per id. Raises `StartError` and adds none."""
        ...

    def step(self) -> Sequence[FinishedRun]: ...

    def abort(self, run_id: str) -> bool: ...

    def measure(self, measures: Measures) -> Mapping[Metric, float]:
        """Add the measurements since the last call; return the current gauges."""
        ...

    def progress(self) -> Mapping[str, tuple[int, int]]:
        """Return the steps done and the steps in all, by live run id."""
        ...


class LoadedModels(NamedTuple):
    """Base models in memory, by name, and the ids of the LoRAs beside them."""

    base_models: Sequence[str]
    loras: Sequence[str]


@runtime_checkable
class ReportsModels(Protocol):
    """An executor that reports the models in its memory, for operators."""

    def loaded_models(self) -> LoadedModels: ...


class MemoryPart(NamedTuple):
    """Bytes of one use on a device, `cuda` or `cpu`."""

    device: str
    use: MemoryUse
    size_bytes: int


@runtime_checkable
class ReportsMemory(Protocol):
    """An executor that reports what its memory is used for, for operators."""

    def memory(self) -> Sequence[MemoryPart]: ...


@runtime_checkable
class PrefetchesAdapters(Protocol):
    """An executor that reads adapters before a job needs them."""

    @property
    def kind(self) -> JobKind: ...

    async def prefetch(self, lora_id: str) -> str | None:
        """Read a LoRA into free memory; return its group, or None where it is here, unknown, or has no space.

        Raises `AdapterUnavailable` and `StoreUnavailable`.
        """
        ...


@runtime_checkable
class ShowsUnfinished(Protocol):
    """An executor that shows unfinished images between steps."""

    def unfinished(self, run_id: str, longest: int) -> tuple[int, Pixels] | None:
        """Return a run's step and its picture so far, at most `longest` pixels on a side.

        It returns at once, on any thread.
        """
        ...
