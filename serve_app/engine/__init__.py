"""Denoise many runs together, each with its own prompt, seed, guidance, step count and LoRA adapter.

`Engine.load(folder).generate("a red circle")` works without a server. What is imported from here is loaded at its first
use: the names in an adapter's file are checked without torch, which takes seconds.
"""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine
    from serve_app.engine.families.checkpoint import Checkpoint
    from serve_app.engine.run import AdapterFile, Finished, RunRequest, as_one
    from serve_app.engine_options import EngineOptions


__all__ = ["AdapterFile", "Checkpoint", "Engine", "EngineOptions", "Finished", "RunRequest", "as_one"]


@contextmanager
def loading() -> Generator[None]:
    """Look for no garbage while a block imports torch and its like, nor later among what they have made.

    These are a million objects that stay. To look at them again and again, and at the process's end, took a third of
    the processor time of a start.
    """
    modules, is_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if is_enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading():
        from serve_app import engine_options
        from serve_app.engine import engine, run
        from serve_app.engine.families import checkpoint

    return next(getattr(home, name) for home in (engine, run, checkpoint, engine_options) if hasattr(home, name))
