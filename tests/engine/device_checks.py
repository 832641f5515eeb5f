"""What is asked of every device, at any size: latents as diffusers', bytes that company does not change, few launches.

`benchmarks.gpu` asks it of a GPU. The tests ask the same of tiny models on a CPU, with more features.
"""

import copy
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from serve_app.engine import AdapterFile, Engine, RunRequest
from tests.engine.run_engine import final_latents, finish

Latents = Mapping[str, Tensor]
"""Final latents by run id, in float32 on the CPU."""


def latents_of_both(engine: Engine, pipeline: Any, requests: Sequence[RunRequest]) -> tuple[Latents, Latents]:
    """Return final latents of the engine, all runs in one batch, and those of diffusers' pipeline, one at a time."""
    (model,) = engine.base_models.values()
    ours = {run_id: latents.float().cpu() for run_id, latents in final_latents(model, requests).items()}
    return ours, {request.run_id: _by_diffusers(pipeline, request) for request in requests}


def _by_diffusers(pipeline: Any, request: RunRequest) -> Tensor:
    """Make one run's latents from the noise that the engine draws, whatever the number type."""
    pipeline = copy.deepcopy(pipeline)
    if isinstance(request.adapter, AdapterFile):
        path = request.adapter.path
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="only")
        pipeline.set_adapters("only", request.scale)
    sides = request.height // pipeline.vae_scale_factor, request.width // pipeline.vae_scale_factor
    noise = torch.randn(1, 4, *sides, generator=torch.Generator().manual_seed(request.seed))
    made = pipeline(
        request.prompt, num_inference_steps=request.steps, guidance_scale=request.guidance, width=request.width,
        height=request.height, latents=noise.to(pipeline.unet.device, pipeline.unet.dtype), output_type="latent",
    )  # fmt: skip
    return made.images[0].float().cpu()


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a share of the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


class Company(NamedTuple):
    """Images made in random company, and how many of them have the bytes of one made alone on another engine."""

    same: int
    made: int
    rows_alone: dict[float, int]
    """The rows of a lone run's pass by its guidance: what the probe found necessary."""


def bytes_in_company(new_engine: Callable[[], Engine], requests: Sequence[RunRequest], seed: int = 0) -> Company:
    """Make images in random company and alone, with and without guidance, by several samplers and step counts."""
    chance = random.Random(seed)
    requests = [
        replace(one, guidance=chance.choice((1.0, 5.0)), steps=chance.randint(1, 3),
                sampler=chance.choice((None, "ddim", "dpm++2m-karras", "euler-a")))
        for one in requests
    ]  # fmt: skip
    together, waiting = dict[str, str](), requests[::-1]
    with new_engine() as engine:
        rows = {guidance: _rows_alone(engine, replace(requests[0], guidance=guidance)) for guidance in (1.0, 5.0)}
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), chance.randint(0, 3))):
                engine.add(waiting.pop())
            together |= {ended.run_id: _digest(ended.image) for ended in engine.step()}
    with new_engine() as engine:
        alone = {one.run_id: _digest(finish(engine, [one])[one.run_id].image) for one in requests}
    return Company(sum(alone[run_id] == together[run_id] for run_id in alone), len(alone), rows)


def _rows_alone(engine: Engine, request: RunRequest) -> int:
    (model,) = engine.base_models.values()
    rows: list[int] = []
    hook = model.denoiser.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[0]))
    finish(engine, [replace(request, steps=1, sampler=None)])
    hook.remove()
    return rows[-1]


def _digest(image: Any) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def trace_steps(step: Callable[[], object], device: torch.device, count: int) -> dict[str, Any]:
    """Trace a few steps; the figures are of one of them. On a CPU, torch's operations stand for kernels."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_gpu]) as traced:
        for _ in range(count):
            step()
        if is_gpu:
            torch.cuda.synchronize()
    events: Any = traced.events()
    kind = "CUDA" if is_gpu else "CPU"
    kernels = [one for one in events if one.device_type.name == kind and not one.cpu_children]
    spans = sorted((one.time_range.start, one.time_range.end) for one in kernels)
    gaps, first, end = list[float](), spans[0][0], spans[0][0]
    for start, until in spans:
        gaps.append(max(0.0, start - end))
        end = max(end, until)
    by_kernel, calls = Counter[str](), Counter[str](one.name for one in events if one.name.startswith("cu"))
    for one in kernels:
        by_kernel[one.name[:80]] += one.time_range.elapsed_us()
    return {
        "launches": round(len(kernels) / count),
        "ms from the first kernel to the last": round((end - first) / 1e3 / count, 2),
        "ms of gaps": round(sum(gaps) / 1e3 / count, 2),
        "ms of the longest gap": round(max(gaps) / 1e3, 2),
        "calls of the driver": {call: calls[call] / count for call, _ in calls.most_common(12)},
        "ms by kernel": {kernel: round(us / 1e3 / count, 3) for kernel, us in by_kernel.most_common(20)},
    }
