"""diffusers' own pipelines, one request at a time: the reference that the engine is compared with."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from serve_app.engine import RunRequest
from serve_app.engine.sampler import DIFFUSERS_CLASS
from serve_app.engine_options import Sampler
from tests.engine.tiny_models import diffusers


def open_pipeline(folder: Path) -> Any:
    """Load the folder's pipeline, without progress bars."""
    name = diffusers.DiffusionPipeline.load_config(str(folder))["_class_name"]
    pipeline = getattr(diffusers, name).from_pretrained(str(folder), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class DiffusersReference:
    """One pipeline, used for one request at a time, its adapters loaded by diffusers and PEFT."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = open_pipeline(folder)
        self._config = self.pipeline.scheduler.config
        self._loaded: dict[str, str] = {}

    def latents(self, request: RunRequest) -> torch.Tensor:
        """[channels, height, width]"""
        return self._call(request, "latent")[0]

    def image(self, request: RunRequest) -> np.ndarray:
        return np.asarray(self._call(request, "pil")[0])

    def _call(self, request: RunRequest, output: str) -> Any:
        if request.sampler:
            self.pipeline.scheduler = getattr(diffusers, DIFFUSERS_CLASS[Sampler(request.sampler)]).from_config(
                self._config
            )
        self._apply_adapter(request)
        return self.pipeline(
            request.prompt,
            negative_prompt=request.negative_prompt or None,
            generator=torch.Generator().manual_seed(request.seed),
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            width=request.width,
            height=request.height,
            output_type=output,
        ).images

    def _apply_adapter(self, request: RunRequest) -> None:
        if request.adapter is None:
            if self._loaded:
                self.pipeline.disable_lora()
            return
        if request.adapter.id not in self._loaded:
            self._loaded[request.adapter.id] = f"adapter{len(self._loaded)}"
            path = request.adapter.path
            self.pipeline.load_lora_weights(
                str(path.parent), weight_name=path.name, adapter_name=self._loaded[request.adapter.id]
            )
        self.pipeline.enable_lora()
        self.pipeline.set_adapters(self._loaded[request.adapter.id], request.scale)
