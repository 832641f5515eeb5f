"""diffusers' own pipelines, one request at a time: the reference that the engine is compared with."""

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from diffusers.guiders.classifier_free_guidance import ClassifierFreeGuidance
from PIL import Image

from serve_app.engine import AdapterFile, RunRequest
from serve_app.engine.sampler import make_scheduler
from tests.engine.tiny_models import diffusers


def open_pipeline(folder: Path) -> Any:
    """Load the folder's pipeline, without progress bars."""
    name = diffusers.DiffusionPipeline.load_config(str(folder))["_class_name"]
    pipeline = getattr(diffusers, name).from_pretrained(str(folder), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class BrownianPath:
    """Gives the SDE scheduler the increments of a Brownian path from a run's noise instead of a tree's."""

    def __init__(self, generator: torch.Generator, shape: Sequence[int]) -> None:
        self.generator, self.start, self.end, self.moved = generator, math.nan, math.nan, torch.zeros(*shape)

    def __call__(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        again = bool(self.start == float(start))
        at = self.end if again else float(start)
        moved = torch.randn(self.moved.shape, generator=self.generator) * math.sqrt(abs(float(end) - at))
        self.moved = self.moved + moved if again else moved
        self.start, self.end = float(start), float(end)
        return self.moved / math.sqrt(abs(self.end - self.start))


class DiffusersReference:
    """One pipeline, used for one request at a time, its adapters loaded by diffusers and PEFT."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = open_pipeline(folder)
        self._loaded: dict[str, str] = {}

    def latents(self, request: RunRequest) -> torch.Tensor:
        """[channels, height, width]"""
        return self._call(request, "latent")[0]

    def image(self, request: RunRequest) -> np.ndarray:
        return np.asarray(self._call(request, "pil")[0])

    def _call(self, request: RunRequest, output: str) -> Any:
        own = self.pipeline.scheduler
        if request.sampler:
            self.pipeline.scheduler = make_scheduler(request.sampler, own)
        self._apply_adapter(request)
        self.trace: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(request.seed)
        scheduler = self.pipeline.scheduler
        set_timesteps = type(scheduler).set_timesteps.__get__(scheduler)

        def set_timesteps_and_noise(*args: Any, **kwargs: Any) -> None:
            set_timesteps(*args, **kwargs)
            if hasattr(scheduler, "noise_sampler"):
                shape = (1, 4, request.height // 8, request.width // 8)
                scheduler.noise_sampler = BrownianPath(generator, shape)

        def keep(
            _pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            self.trace.append(tensors["latents"][0].clone())
            return tensors

        if hasattr(scheduler, "noise_sampler"):
            scheduler.set_timesteps = set_timesteps_and_noise
        pipeline, begins = self.begins(request)
        denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
        guided = denoiser.register_forward_hook(self._hook(request, pipeline))
        made = pipeline(
            request.prompt,
            negative_prompt=request.negative_prompt or None,
            generator=generator,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            output_type=output,
            callback_on_step_end=keep,
            **begins,
        ).images
        guided.remove()
        self.pipeline.scheduler = own
        return made

    def acts(self, request: RunRequest, pipeline: Any) -> bool:
        """Return whether diffusers' guider takes a negative prompt in the pass that is next."""
        guider: Any = ClassifierFreeGuidance(start=request.guidance_start, stop=request.guidance_end)
        passes, order = pipeline.num_timesteps, getattr(pipeline.scheduler, "order", 1)
        steps = request.steps if pipeline is self.pipeline else -(-passes // order)
        step = len(self.trace) * steps // passes
        guider.set_state(step=step, num_inference_steps=steps, timestep=torch.zeros(1))
        return guider.num_conditions == 2

    def _hook(self, request: RunRequest, pipeline: Any) -> Any:
        """Return a hook that puts the prompt's output in place of the negative one's where guidance does not act."""

        def replaced(_module: Any, _inputs: Any, output: tuple[Any, ...]) -> Any:
            made = output[0]
            if len(made) == 1 or self.acts(request, pipeline):
                return output
            return ([made[0]] * 2,) if isinstance(made, list) else (made[1:].expand(2, *made.shape[1:]),)

        return replaced

    def begins(self, request: RunRequest) -> tuple[Any, dict[str, Any]]:
        """Return the pipeline that begins as the request does, and its further arguments."""
        size = {"width": request.width, "height": request.height}
        if request.image is None:
            return self.pipeline, size
        kind, given = "Img2Img", {"strength": request.strength, "image": Image.fromarray(request.image)}
        if request.mask is not None:
            kind, given = "Inpaint", {**given, "mask_image": Image.fromarray(request.mask)}
        name = type(self.pipeline).__name__.removesuffix("Pipeline")
        begun = getattr(diffusers, f"{name}{kind}Pipeline").from_pipe(self.pipeline)
        begun.set_progress_bar_config(disable=True)
        takes = inspect.signature(begun.__call__).parameters
        return begun, given | {side: pixels for side, pixels in size.items() if side in takes}

    def _apply_adapter(self, request: RunRequest) -> None:
        if request.adapter is None:
            if self._loaded:
                self.pipeline.disable_lora()
            return
        adapter = request.adapter
        parts = ((adapter, 1.0),) if isinstance(adapter, AdapterFile) else adapter.parts
        for file, _ in parts:
            if file.id not in self._loaded:
                self._loaded[file.id] = f"adapter{len(self._loaded)}"
                self.pipeline.load_lora_weights(
                    str(file.path.parent), weight_name=file.path.name, adapter_name=self._loaded[file.id]
                )
        self.pipeline.enable_lora()
        self.pipeline.set_adapters(
            [self._loaded[file.id] for file, _ in parts],
            [weight * request.scale for _, weight in parts],
        )


class PeftReference(DiffusersReference):
    """One pipeline with an adapter of PEFT in any of its parts, where diffusers loads but one of them."""

    @property
    def adapted(self) -> list[str]:
        names = ("transformer", "text_encoder", "text_encoder_2", "text_conditioner")
        return [name for name in names if getattr(self.pipeline, name, None) is not None]

    def adapt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put an adapter of PEFT's names in, at its whole strength."""
        for part in self.adapted:
            own = {name.removeprefix(f"{part}."): each for name, each in tensors.items() if name.startswith(f"{part}.")}
            if own:
                rank = next(len(each) for name, each in own.items() if name.endswith("lora_A.weight"))
                targets = sorted({name.partition(".lora_")[0] for name in own})
                config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)  # pyright: ignore
                model = getattr(self.pipeline, part)
                peft.inject_adapter_in_model(config, model)
                found = peft.set_peft_model_state_dict(model, dict(own))
                assert not found.unexpected_keys

    def scale(self, scale: float) -> None:
        """Let the adapter act at this weight."""
        for part in self.adapted:
            for layer in getattr(self.pipeline, part).modules():
                if isinstance(getattr(layer, "scaling", None), dict):
                    layer.scaling = dict.fromkeys(layer.scaling, scale)
