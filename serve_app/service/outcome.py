"""Outcomes of an attempt at a job."""

from dataclasses import dataclass

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, StoredImage, Timings


@dataclass(frozen=True, slots=True)
class Completed:
    images: tuple[StoredImage, ...]
    seconds: float
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    failure: Failure
    retry: bool


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease belongs to another attempt: this one may write nothing more."""


@dataclass(frozen=True, slots=True)
class Released:
    """The worker is draining: the job returns to its place in the queue."""


Outcome = Completed | Failed | LeaseLost | Released


class RunFailed(Exception):
    """A run ended without an image."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def generation_failed(message: str) -> Failure:
    return Failure(code=FailureCode.GENERATION_FAILED, message=message)
