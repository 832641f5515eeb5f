"""What a worker works at: the engine for generations, the upscaler for upscales, behind one set of verbs."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Claim, Failure, JobKind

Pixels = NDArray[np.uint8]
"""An image of shape [height, width, 3], RGB."""


class FinishedRun(Protocol):
    """One run's end: an image, or the reason why there is none."""

    @property
    def key(self) -> str: ...
    @property
    def image(self) -> Pixels | None: ...
    @property
    def failure(self) -> Failure | None: ...


class CannotStart(AtelierError):
    """A claim's runs cannot begin; `failure` is what its record will say, `retry` whether trying again may help."""

    def __init__(self, failure: Failure, *, retry: bool) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry = retry


class Bench(Protocol):
    """Makes images. `step` works for as long as one step takes and is called from one thread; `start` waits without
    blocking the event loop; everything else returns at once and may be called from any thread."""

    @property
    def kind(self) -> JobKind: ...

    @property
    def free_rows(self) -> int:
        """How many more runs could start now."""
        ...

    @property
    def resident(self) -> Sequence[str]:
        """Groups whose weights are held: their jobs start without loading anything."""
        ...

    @property
    def has_work(self) -> bool: ...

    async def start(self, claim: Claim, keys: Sequence[str]) -> None:
        """Fetch what the claim needs, then add its runs, one per key. Raises `CannotStart` and adds none."""
        ...

    def step(self) -> Sequence[FinishedRun]: ...

    def abort(self, key: str) -> bool: ...

    def progress(self) -> Mapping[str, tuple[int, int]]:
        """Steps done and steps in all, per live run."""
        ...
