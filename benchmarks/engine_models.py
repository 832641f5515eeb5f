"""Models of the engine benchmark: the pocket model, or SD 1.5, SDXL, Z-Image and klein with random weights."""

import copy
import hashlib
import itertools
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from serve_app.engine.base_model import BaseModel, Shared
from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.families.checkpoint import load_pipeline
from serve_app.engine.families.registry import FAMILIES
from serve_app.engine.float8 import to_float8
from tests.engine.tiny_flux2_klein import BLOCK_LINEARS, write_flux2_klein
from tests.engine.tiny_z_image import write_z_image
from tests.engine.true_models import (
    ATTENTION,
    TRANSFORMER,
    diffusers,
    random_adapter,
    random_flux2_klein,
    random_pipeline,
    random_z_image,
)

ROOT = Path(__file__).resolve().parent.parent
POCKET = ROOT / "models" / "pocket"
PROMPTS = (
    "a red circle on a blue background",
    "a green star on a white background",
    "a yellow heart",
    "a purple triangle",
)


FAMILY_OF = {"pocket": "sd", "sd15": "sd", "sdxl": "sdxl", "z-image": "z-image", "klein": "flux2-klein"}


class BenchmarkModel(NamedTuple):
    """A model, its adapters as files, and the size its images are made at."""

    name: str
    pipeline: Any
    adapters: list[AdapterFile]
    side: int
    options: EngineOptions
    findings: Path | None = None
    """Where engines keep what they measured of exactness, so that the next one need not."""
    precision: str = ""
    """`fp8` computes large products in float8."""

    def engine(self, **changes: Any) -> Engine:
        """Return a fresh engine over a copy of the model, so that no two engines share state."""
        options = replace(self.options, **changes)
        engine = Engine(options)
        make: Any = FAMILIES[FAMILY_OF[self.name]]
        family = make(copy.deepcopy(self.pipeline), options)
        if self.precision:
            to_float8(family.lanes, family.common_targets, options)
        shared = Shared(findings=self.findings)
        engine.base_models = {self.name: BaseModel(self.name, family, options, engine.live.wake, shared)}
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
    """Return the model `name` of `FAMILY_OF`.

    `rank` is that of the adapters made here; the pocket model brings eight of its own.
    """
    torch.manual_seed(0)
    device, dtype = torch_device(options), torch_dtype(options)
    pipeline = load_pipeline(POCKET, dtype) if name == "pocket" else _random(name, device, into, tiny=tiny)
    pipeline.to(device, dtype)
    denoiser, targets = ("unet", TRANSFORMER) if hasattr(pipeline, "unet") else ("transformer", TRANSFORMERS[name][2])
    for part in (pipeline.unet, pipeline.vae) if denoiser == "unet" else ():  # for every policy alike
        part.to(memory_format=torch.channels_last)
    pipeline.set_progress_bar_config(disable=True)
    own = sorted((POCKET / "loras").glob("*.safetensors")) if name == "pocket" else []
    files = [Path(shutil.copy(file, into)) for file in own]  # the same bytes to the end, whatever is trained meanwhile
    targets = ("conv1", "conv2", *ATTENTION) if name == "pocket" else targets
    files += [
        random_adapter(getattr(pipeline, denoiser), into / f"random{i}.safetensors", rank, i, targets, denoiser)
        for i in range(adapters - len(files))
    ]
    ready = [AdapterFile(hashlib.sha256(file.read_bytes()).hexdigest(), file) for file in files]
    return BenchmarkModel(name, pipeline, ready[:adapters], side, options)


TRANSFORMERS = {
    "z-image": (random_z_image, write_z_image, (*ATTENTION, "w1", "w2", "w3")),
    "klein": (random_flux2_klein, partial(write_flux2_klein, distilled=True), BLOCK_LINEARS),
}
"""What makes each, what writes a tiny one, and the layers that adapters change."""


def _random(name: str, device: torch.device, into: Path, *, tiny: bool) -> Any:
    if name not in TRANSFORMERS:
        return random_pipeline(name, device, tiny=tiny)
    make, write, _ = TRANSFORMERS[name]
    if tiny:
        return diffusers.DiffusionPipeline.from_pretrained(str(write(into / "tiny")))
    pipeline = make(device)
    for token in ("x_pad_token", "cap_pad_token"):  # these alone have no numbers yet
        if hasattr(pipeline.transformer, token):
            torch.nn.init.normal_(getattr(pipeline.transformer, token))
    return pipeline
