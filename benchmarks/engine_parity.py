"""How far the engine's final latents are from those of diffusers' own pipeline."""

import argparse
import copy
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine_models import BenchmarkModel, diffusers
from serve_app.engine import RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.unet import SAMPLERS
from serve_app.engine.run import Run
from serve_app.engine.sampler import DIFFUSERS_CLASS

SMALL = 256
"""Pixels."""


def parity(benchmark: BenchmarkModel, _: argparse.Namespace) -> dict[str, Any]:
    """Compare our mixed batch with diffusers' images one at a time, for each sampler.

    Adapters have three weights, with guidance on and off.
    """
    small = benchmark._replace(side=min(benchmark.side, SMALL))
    pipeline = _pipeline_with_adapters(small)
    worst: dict[str, float] = {}
    config = pipeline.scheduler.config
    for sampler in SAMPLERS:
        requests = [
            replace(one, scale=weight, sampler=sampler, steps=20, guidance=guidance, run_id=f"{sampler}{i}")
            for i, (one, weight, guidance) in enumerate(zip(small.requests(6, adapters=6, steps=20), (0.1, 0.75, 1.0) * 2, (5.0, 5.0, 5.0, 1.0, 1.0, 1.0), strict=True))
        ]  # fmt: skip
        made = _latents(small, requests)
        pipeline.scheduler = getattr(diffusers, DIFFUSERS_CLASS[sampler]).from_config(config)
        errors: list[float] = []
        for one in requests:
            assert one.adapter is not None
            pipeline.set_adapters(one.adapter.id[:8], one.scale)
            theirs = pipeline(one.prompt, generator=torch.Generator().manual_seed(one.seed), num_inference_steps=one.steps,
                                 guidance_scale=one.guidance, width=one.width, height=one.height, output_type="latent").images[0]  # fmt: skip
            errors.append(float((theirs - made[one.run_id]).abs().max()))
        worst[sampler] = max(errors)
    return {"largest_latent_error": worst}


@torch.inference_mode()
def _latents(benchmark: BenchmarkModel, requests: list[RunRequest]) -> dict[str, torch.Tensor]:
    (model,) = benchmark.engine().base_models.values()
    live = [_start(model, request) for request in requests]
    while running := [run for run in live if not run.is_done]:
        model.runner.denoise(running)
    return {run.request.run_id: run.latents for run in live}


def _start(model: BaseModel, request: RunRequest) -> Run:
    while (run := model.start(request, 0.0)) is None:
        model.pool.wait_for_loader()
    return run


def _pipeline_with_adapters(benchmark: BenchmarkModel) -> Any:
    pipeline = copy.deepcopy(benchmark.pipeline)
    pipeline.set_progress_bar_config(disable=True)
    for file in benchmark.adapters[:6]:
        pipeline.load_lora_weights(str(file.path.parent), weight_name=file.path.name, adapter_name=file.id[:8])
    return pipeline
