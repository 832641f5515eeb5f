"""Compares an adapter's latents in the engine with its writer's own, and with diffusers'."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

from serve_app.engine import AdapterFile, EngineOptions, RunRequest, adapter_slots
from serve_app.engine.base_model import BaseModel
from tests.engine.diffusers_reference import open_pipeline
from tests.engine.run_engine import final_latents

SOME_WEIGHTS, EVERY_WEIGHT = (0.0, 0.75), (0.0, 0.1, 0.75, 1.0, 1.5)
TOLERANCE, EFFECT = 1e-4, 1e-2
ROUNDING = 2e-6
"""How much of the largest number sums of float32 differ by in another order."""
OPTIONS = EngineOptions(device="cpu", dtype="float32", exact=False, max_rank=128)
Module = tuple[str, str]
"""Component and layer."""
compared = dict[str, float]()
"""The largest error of each row that ran, for the report at the end."""


class Base:
    """A base model in the engine and in diffusers' pipeline."""

    tolerance = TOLERANCE

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.engine_model = BaseModel.load(name, folder, OPTIONS, lambda: None)
        self.pipeline = open_pipeline(folder)
        present = ("unet", "text_encoder", "text_encoder_2")
        self.components: dict[str, Any] = {
            part: module for part in present if (module := getattr(self.pipeline, part, None)) is not None
        }
        self.original = {part: copy.deepcopy(module.state_dict()) for part, module in self.components.items()}
        self.plain = self.latents()

    def latents(self) -> Tensor:
        """Return what the pipeline makes with whatever is in place: [channels, height, width]."""
        return self.pipeline(
            "a red cat",
            negative_prompt="dull",
            generator=torch.Generator().manual_seed(7),
            num_inference_steps=2,
            guidance_scale=4.0,
            width=32,
            height=32,
            output_type="latent",
        ).images[0]

    def with_adapter(self, path: Path, weights: Sequence[float] = SOME_WEIGHTS) -> list[Tensor]:
        """Return the engine's latents at each weight, all in one batch."""
        adapter = AdapterFile(id=str(path), path=path)
        requests = [
            RunRequest(
                run_id=f"{weight}", prompt="a red cat", negative_prompt="dull", adapter=adapter, scale=weight, seed=7,
                steps=2, guidance=4.0, width=32, height=32,
            )
            for weight in weights
        ]  # fmt: skip
        made = final_latents(self.engine_model, requests)
        return [made[request.run_id] for request in requests]

    def merged(self, changes: Mapping[Module, Tensor], weight: float) -> Tensor:
        """Return the latents with the changes times the weight added to the base's own weights."""
        with torch.no_grad():
            for (component, layer), change in changes.items():
                parameter = self.components[component].get_submodule(layer).weight
                parameter.add_(change.reshape(parameter.shape) * weight)
        made = self.latents()
        self.restore()
        return made

    def restore(self) -> None:
        for part, module in self.components.items():
            module.load_state_dict(self.original[part])

    def layers(self, component: str, endings: tuple[str, ...]) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
        for name, module in self.components[component].named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)) and name.endswith(endings):
                yield name, module


class Adaptable(Protocol):
    """A base model that answers with an adapter at each weight, all in tensors of one shape."""

    plain: Tensor
    tolerance: float

    def with_adapter(self, path: Path, weights: Sequence[float]) -> list[Tensor]: ...


def require_equal(
    base: Adaptable,
    path: Path,
    weights: Sequence[float],
    expected: Callable[[float], Tensor],
    *,
    factored: bool = False,
) -> None:
    """Require that the engine's answers are the writer's at each weight, and that the adapter does something.

    Layers as small as these take a LoKr as a LoRA, unless `factored` lets its factors cost nothing but their work.
    """
    wanted = [expected(weight) for weight in weights]
    effect = max(float((latents - base.plain).abs().max()) for latents in wanted)
    assert effect > EFFECT, "the reference shows no effect"
    with pytest.MonkeyPatch.context() as patch:
        if factored:
            patch.setattr(adapter_slots, "FACTORS_RANK", 0)
        made = base.with_adapter(path, weights)
    errors = [float((ours - theirs).abs().max()) for ours, theirs in zip(made, wanted, strict=True)]
    compared[os.environ["PYTEST_CURRENT_TEST"]] = max(errors)
    allowed = max(base.tolerance, ROUNDING * max(float(latents.abs().max()) for latents in wanted))
    assert max(errors) <= allowed, f"at weights {weights} {errors}, of an effect of {effect:.3f}"
