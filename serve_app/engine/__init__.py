"""Denoise many runs together, each with its own prompt, seed, guidance, step count and LoRA adapter.

`Engine.load(folder).generate("a red circle")` works without a server. What is imported from here is loaded at its first
use: reading an adapter needs neither diffusers nor transformers, which take seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine
    from serve_app.engine.families.checkpoint import Checkpoint
    from serve_app.engine.run import AdapterFile, Finished, RunRequest, as_one
    from serve_app.engine_options import EngineOptions


__all__ = ["AdapterFile", "Checkpoint", "Engine", "EngineOptions", "Finished", "RunRequest", "as_one"]

_HOMES = {
    "AdapterFile": "serve_app.engine.run",
    "Checkpoint": "serve_app.engine.families.checkpoint",
    "Engine": "serve_app.engine.engine",
    "EngineOptions": "serve_app.engine_options",
    "Finished": "serve_app.engine.run",
    "RunRequest": "serve_app.engine.run",
    "as_one": "serve_app.engine.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
