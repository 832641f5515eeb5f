"""How a run ends: with its image, or with what went wrong, by name."""

import time
from concurrent.futures import Future

import numpy as np
import torch

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.engine.adapters_file import UnusableAdapter
from serve_app.engine.memory import NO_ROOM, is_out_of_memory
from serve_app.engine.run import Finished, Run


def decoded(run: Run, image: Future[np.ndarray]) -> Finished:
    """The end of a run whose decoding is over, well or not."""
    error = image.exception()
    if error is not None:
        return failed(run.request.key, run.added_at, error)
    return Finished(run.request.key, image.result(), None, time.monotonic() - run.added_at)


def failed(key: str, since: float, error: BaseException) -> Finished:
    """Raises `error` itself when it is no run's: every run on this device is lost with it, and may succeed on another."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return Finished(key, None, _failure(error), time.monotonic() - since)


def _failure(error: BaseException) -> Failure:
    if is_out_of_memory(error):
        return Failure(code=FailureCode.OUT_OF_MEMORY, message=NO_ROOM)
    if isinstance(error, (UnusableAdapter, OSError)):
        return Failure(code=FailureCode.LORA_UNAVAILABLE, message=str(error))
    if isinstance(error, (ValueError, FloatingPointError)):
        return Failure(code=FailureCode.GENERATION_FAILED, message=str(error))
    return Failure(code=FailureCode.GENERATION_FAILED, message=f"making the image failed: {type(error).__name__}")
