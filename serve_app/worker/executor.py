"""The base of executors, which run a worker's jobs: the engine's and the upscaler's."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from serve_app.domain.errors import AtelierError, FailureCode, NotFound, StoreUnavailable
from serve_app.domain.jobs import Claim, Failure, Unread
from serve_app.domain.metrics import MemoryUse, Metric
from serve_app.jobs.images import ImageStore
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

    @property
    def unread(self) -> Unread: ...


class RunFailed(AtelierError):
    """A claim's runs cannot start, or one of them ended without an image.

    `failure` goes into the job's record; `retry` says whether another attempt may help.
    """

    def __init__(self, failure: Failure, *, retry: bool) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry = retry


class NotLoaded(AtelierError):
    """This worker lacks the claim's base model: another has it, or will when the generators have started again."""


def generation_failed(message: str) -> Failure:
    return Failure(code=FailureCode.GENERATION_FAILED, message=message)


async def stored_image(images: ImageStore, uri: str, name: str) -> bytes:
    """Read the file of an image that a job starts from. Raises `RunFailed`, which has the name."""
    try:
        return await images.get(uri)
    except NotFound as error:
        raise RunFailed(generation_failed(f"The {name} is no longer stored."), retry=False) from error
    except StoreUnavailable as error:
        raise RunFailed(generation_failed(f"The {name} cannot be read."), retry=True) from error


class LoadedModels(NamedTuple):
    """Base models in memory, by name, and the ids of the LoRAs in slots next to them."""

    base_models: Sequence[str] = ()
    loras: Sequence[str] = ()


class MemoryPart(NamedTuple):
    """Bytes of one use on a device, `cuda` or `cpu`."""

    device: str
    use: MemoryUse
    size_bytes: int


class Executor(ABC):
    """Runs jobs.

    `step` blocks for one step and is called from one thread; `start` and `prefetch` are awaited on the event loop; all
    else returns at once and may be called from any thread.
    """

    pool: str
    """The pool whose jobs it runs."""
    shows_unfinished = False
    """Whether `unfinished` can show anything."""

    @property
    @abstractmethod
    def free_runs(self) -> int:
        """Return how many more runs could start now."""

    @property
    def resident(self) -> Sequence[str]:
        """Return the weights (digests of LoRAs) that are in memory: their jobs wait for no file."""
        return ()

    @property
    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        """Fetch what the claim needs, then add its runs, one per id.

        Raises `RunFailed` or `NotLoaded`, and adds none.
        """

    @abstractmethod
    def step(self) -> Sequence[FinishedRun]: ...

    @abstractmethod
    def abort(self, run_id: str) -> bool: ...

    @abstractmethod
    def progress(self) -> Mapping[str, tuple[int, int]]:
        """Return the steps done and the steps in all, by live run id."""

    def measure(self, measures: Measures) -> Mapping[Metric, float]:
        """Add the measurements since the last call; return the current gauges."""
        return {}

    def loaded_models(self) -> LoadedModels:
        """Return the models in memory, for operators."""
        return LoadedModels()

    def memory(self) -> Sequence[MemoryPart]:
        """Return what the memory is used for, for operators."""
        return ()

    def changed_pictures(self) -> Mapping[str, bool]:
        """Return of each base model whether it draws otherwise than it did before an update."""
        return {}

    def kernels(self) -> Mapping[str, bool]:
        """Return whether each kernel that is for this device runs; one that does not has fallen back to torch."""
        return {}

    async def prefetch(self, lora_id: str, base_model: str = "") -> str | None:
        """Read a LoRA into free memory; return its digest, or None where it is here, unknown, or has no space.

        It is read for `base_model`; '' is its own. Raises `AdapterUnavailable` and `StoreUnavailable`.
        """
        return None

    def unfinished(self, run_id: str, longest: int) -> tuple[int, Pixels] | None:
        """Return a run's step and its picture so far, at most `longest` pixels on a side."""
        return None
