"""Hides progress bars and two misleading warnings of diffusers and transformers during loading."""

import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_LIBRARIES = ("diffusers.utils.logging", "transformers.utils.logging")
_MISLEADING = {
    "diffusers.pipelines.pipeline_utils": "Expected types for vae",  # our VAE is a tiny one, which the UNet suits
    "transformers.utils.import_utils": "ImageProcessor` requires torchvision",  # nothing here processes images by it
}
"""Part of each warning's text, by the logger that emits it."""


@contextmanager
def quiet_loading() -> Generator[None]:
    """Restore progress bars and warnings at the end of the block."""
    libraries: list[Any] = [importlib.import_module(name) for name in _LIBRARIES]
    with_bars = [library for library in libraries if library.is_progress_bar_enabled()]
    loggers = [logging.getLogger(name) for name in _MISLEADING]
    for library in with_bars:
        library.disable_progress_bar()
    for logger in loggers:
        logger.addFilter(_is_not_misleading)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_not_misleading)
        for library in with_bars:
            library.enable_progress_bar()


def _is_not_misleading(record: logging.LogRecord) -> bool:
    return _MISLEADING[record.name] not in record.getMessage()
