"""Outcome of a run: its image, or a named failure."""

import time
from concurrent.futures import Future

import numpy as np
import torch

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.engine.adapters import UnusableAdapter
from serve_app.engine.memory import OUT_OF_MEMORY_MESSAGE, is_out_of_memory
from serve_app.engine.run import Finished, Run


def outcome_of_decoding(run: Run, image: Future[np.ndarray]) -> Finished:
    """Outcome of a run whose decoding is done."""
    error = image.exception()
    if error is not None:
        return failure_outcome(run.request.run_id, run.added_at, error)
    now = time.monotonic()
    return Finished(run.request.run_id, image.result(), None, now - run.added_at, now - run.denoised_at)


def failure_outcome(run_id: str, added_at: float, error: BaseException) -> Finished:
    """Return the outcome of a run that failed with `error`.

    Raises an AcceleratorError itself: the device, not the run, failed.
    """
    if isinstance(error, torch.AcceleratorError):
        raise error
    return Finished(run_id, None, _failure(error), time.monotonic() - added_at)


def _failure(error: BaseException) -> Failure:
    if is_out_of_memory(error):
        return Failure(code=FailureCode.OUT_OF_MEMORY, message=OUT_OF_MEMORY_MESSAGE)
    if isinstance(error, UnusableAdapter):
        return Failure(code=FailureCode.LORA_UNAVAILABLE, message=str(error))
    if isinstance(error, OSError):  # its own text has the path
        return Failure(
            code=FailureCode.LORA_UNAVAILABLE, message=f"the adapter's weights cannot be read: {error.strerror}"
        )
    if isinstance(error, (ValueError, FloatingPointError)):
        return Failure(code=FailureCode.GENERATION_FAILED, message=str(error))
    return Failure(code=FailureCode.GENERATION_FAILED, message=f"making the image failed: {type(error).__name__}")
