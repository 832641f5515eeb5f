"""C11: how far the engine's final latents are from those of diffusers' own pipeline."""

import argparse
import copy
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine_subjects import Subject, diffusers
from serve_app.engine import RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.run import Run
from serve_app.engine.sampler import DIFFUSERS_CLASS, Sampler

SMALL = 256
"""Pixels."""


def parity(subject: Subject, _: argparse.Namespace) -> dict[str, Any]:
    """Ours in mixed company, diffusers' one at a time, per sampler; adapters at three weights, guidance on and off."""
    small = subject._replace(side=min(subject.side, SMALL))
    pipeline = _pipeline_with_adapters(small)
    worst: dict[str, float] = {}
    config = pipeline.scheduler.config
    for sampler in Sampler:
        requests = [
            replace(one, weight=weight, sampler=sampler, steps=20, guidance=guidance, key=f"{sampler}{i}")
            for i, (one, weight, guidance) in enumerate(zip(small.requests(6, adapters=6, steps=20), (0.1, 0.75, 1.0) * 2, (5.0, 5.0, 5.0, 1.0, 1.0, 1.0), strict=True))
        ]  # fmt: skip
        made = _latents(small, requests)
        pipeline.scheduler = getattr(diffusers, DIFFUSERS_CLASS[sampler]).from_config(config)
        errors: list[float] = []
        for one in requests:
            assert one.adapter is not None
            pipeline.set_adapters(one.adapter.id[:8], one.weight)
            theirs = pipeline(one.prompt, generator=torch.Generator().manual_seed(one.seed), num_inference_steps=one.steps,
                                 guidance_scale=one.guidance, width=one.width, height=one.height, output_type="latent").images[0]  # fmt: skip
            errors.append(float((theirs - made[one.key]).abs().max()))
        worst[sampler] = max(errors)
    return {"largest_latent_error": worst}


@torch.inference_mode()
def _latents(subject: Subject, requests: list[RunRequest]) -> dict[str, torch.Tensor]:
    (model,) = subject.engine().base_models.values()
    live = [_start(model, request) for request in requests]
    while running := [run for run in live if not run.is_done]:
        model.runner.denoise(running)
    return {run.request.key: run.latents for run in live}


def _start(model: BaseModel, request: RunRequest) -> Run:
    while (run := model.start(request, 0.0)) is None:
        model.pool.wait_for_loader()
    return run


def _pipeline_with_adapters(subject: Subject) -> Any:
    pipeline = copy.deepcopy(subject.pipeline)
    pipeline.set_progress_bar_config(disable=True)
    for file in subject.adapters[:6]:
        pipeline.load_lora_weights(str(file.path.parent), weight_name=file.path.name, adapter_name=file.id[:8])
    return pipeline
