"""Denoises many runs together, one step at a time, each with its own prompt, seed, guidance, step count and LoRA adapter.

`Engine.load(folder).generate("a red circle")` needs no server.
"""

from serve_app.engine.engine import Engine
from serve_app.engine.families.checkpoint import Checkpoint
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import AdapterFile, Finished, RunRequest

__all__ = ["AdapterFile", "Checkpoint", "Engine", "EngineOptions", "Finished", "RunRequest"]
