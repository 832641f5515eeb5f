"""Models of the engine benchmark: the pocket model, or SD 1.5 and SDXL with random weights."""

import copy
import hashlib
import itertools
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.families.checkpoint import load_pipeline
from serve_app.engine.families.unet import UNetFamily
from tests.engine.true_models import ATTENTION, TRANSFORMER, random_adapter, random_pipeline

ROOT = Path(__file__).resolve().parent.parent
POCKET = ROOT / "models" / "pocket"
PROMPTS = (
    "a red circle on a blue background",
    "a green star on a white background",
    "a yellow heart",
    "a purple triangle",
)


class BenchmarkModel(NamedTuple):
    """A model, its adapters as files, and the size its images are made at."""

    name: str
    pipeline: Any
    adapters: list[AdapterFile]
    side: int
    options: EngineOptions

    def engine(self, **changes: Any) -> Engine:
        """Return a fresh engine over a copy of the model, so that no two engines share state."""
        options = replace(self.options, **changes)
        engine = Engine(options)
        family = UNetFamily(copy.deepcopy(self.pipeline), options)
        engine.base_models = {self.name: BaseModel(self.name, family, options, lambda: None)}
        return engine

    @property
    def device(self) -> torch.device:
        return torch_device(self.options)

    def wall(self) -> float:
        """Return seconds by the clock, once the device has finished."""
        return wall(self.device)

    def requests(self, count: int, *, adapters: int, steps: int, first: int = 0) -> list[RunRequest]:
        """`count` runs over `adapters` adapters in turn, with different prompts, seeds and guidance."""
        files = itertools.cycle(self.adapters[:adapters]) if adapters else itertools.repeat(None)
        return [
            RunRequest(
                run_id=f"{first + i}",
                prompt=PROMPTS[i % len(PROMPTS)],
                adapter=file,
                scale=(0.75, 1.0, 0.5)[i % 3],
                seed=first + i,
                steps=steps,
                guidance=5.0 + i % 4,
                width=self.side,
                height=self.side,
            )
            for i, file in zip(range(count), files, strict=False)
        ]


def wall(device: torch.device) -> float:
    """Return seconds by the clock, once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def make_model(
    name: str, options: EngineOptions, into: Path, *, adapters: int, rank: int, side: int, tiny: bool = False
) -> BenchmarkModel:
    """Return the model `name`: pocket, sd15 or sdxl.

    `rank` is that of the adapters made here; the pocket model brings eight of its own.
    """
    torch.manual_seed(0)
    device, dtype = torch_device(options), torch_dtype(options)
    pipeline = load_pipeline(POCKET, dtype) if name == "pocket" else random_pipeline(name, device, tiny=tiny)
    pipeline.to(device, dtype)
    for part in (pipeline.unet, pipeline.vae):  # for every policy alike
        part.to(memory_format=torch.channels_last)
    pipeline.set_progress_bar_config(disable=True)
    own = sorted((POCKET / "loras").glob("*.safetensors")) if name == "pocket" else []
    files = [Path(shutil.copy(file, into)) for file in own]  # the same bytes to the end, whatever is trained meanwhile
    targets = ("conv1", "conv2", *ATTENTION) if name == "pocket" else TRANSFORMER
    files += [
        random_adapter(pipeline.unet, into / f"random{i}.safetensors", rank, i, targets)
        for i in range(adapters - len(files))
    ]
    ready = [AdapterFile(hashlib.sha256(file.read_bytes()).hexdigest(), file) for file in files]
    return BenchmarkModel(name, pipeline, ready[:adapters], side, options)
