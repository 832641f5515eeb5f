"""Denoise many runs together, each with its own prompt, seed, guidance, step count and LoRA adapter.

`Engine.load(folder).generate("a red circle")` works without a server. What is imported from here is loaded at its first
use: the names in an adapter's file are checked without torch, which takes seconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine
    from serve_app.engine.families.checkpoint import Checkpoint
    from serve_app.engine.run import AdapterFile, Finished, RunRequest, as_one
    from serve_app.engine_options import EngineOptions


__all__ = ["AdapterFile", "Checkpoint", "Engine", "EngineOptions", "Finished", "RunRequest", "as_one"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from serve_app import engine_options
    from serve_app.engine import engine, run
    from serve_app.engine.families import checkpoint

    return next(getattr(home, name) for home in (engine, run, checkpoint, engine_options) if hasattr(home, name))
