"""Denoise many runs together, each with its own prompt, seed, guidance, step count and LoRA adapter.

`Engine.load(folder).generate("a red circle")` works without a server.
"""

from serve_app.engine.engine import Engine
from serve_app.engine.families.checkpoint import Checkpoint
from serve_app.engine.run import AdapterFile, Finished, RunRequest
from serve_app.engine_options import EngineOptions

__all__ = ["AdapterFile", "Checkpoint", "Engine", "EngineOptions", "Finished", "RunRequest"]
