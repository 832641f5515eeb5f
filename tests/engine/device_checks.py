"""What is asked of every device, at any size: latents as diffusers', bytes that company does not change, few launches.

`benchmarks.gpu` asks it of a GPU. The tests ask the same of tiny models on a CPU, with more features.
"""

import copy
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from serve_app.engine import AdapterFile, Engine, Finished, RunRequest, as_one
from serve_app.engine.families.family import Family
from tests.engine.run_engine import begun_at_random, final_latents, finish

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


FULL_ROWS = 16
"""So many runs are guided: the first of them fill the widest pass."""


def varied(number: int, plain: RunRequest, files: Sequence[AdapterFile], family: Family) -> RunRequest:
    """Return a request that differs from its neighbours in all that a run may, the same whenever it is drawn."""
    chance = random.Random(f"run {number}")
    parts = chance.sample(files, chance.choice((1, 1, 1, min(3, len(files)))))
    applied = as_one((file, chance.choice((0.5, 1.0, -0.5))) for file in parts)
    samplers = (None, "ddim", "dpm++2m-karras", "euler-a") if family.denoiser == "unet" else (None,)
    request = replace(
        plain, run_id=f"{number}", seed=number, adapter=applied.adapter, scale=applied.scale,
        guidance=5.0 if number < FULL_ROWS else chance.choice((1.0, 5.0)), steps=chance.randint(2, 3),
        sampler=chance.choice(samplers),
    )  # fmt: skip
    return begun_at_random(request, chance, masks=family.begins_from_images)


def drawn_in_company(engine: Engine, draw: Callable[[int], RunRequest], most: int, until: float) -> dict[str, str]:
    """Return the outcomes of runs that join and leave in waves, the first of which fills the widest batch.

    No run begins after the time `until` of `time.monotonic`.
    """
    chance, begun, together = random.Random(most), 0, dict[str, str]()
    while engine.has_work or (begun < most and (not begun or time.monotonic() < until)):
        joining = chance.choice((0, 1, 2, 3, engine.options.runs)) if begun else engine.options.runs
        for _ in range(min(most - begun, joining) if time.monotonic() < until or not begun else 0):
            engine.add(draw(begun))
            begun += 1
        together |= {ended.run_id: outcome(ended) for ended in engine.step()}
    return together


def bytes_in_company(
    new_engine: Callable[[], Engine],
    draw: Callable[[int], RunRequest],
    most: int,
    *,
    until: float = math.inf,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Make images in random company, then each alone on another engine, as after a restart; as many as time allows.

    `tell` is told what is known after each. An image that failed counts as made, and its failure as its bytes.
    """
    found: dict[str, Any] = {}
    with new_engine() as engine:
        now = time.monotonic()
        together = drawn_in_company(engine, draw, most, until if until == math.inf else now + (until - now) * 0.4)
        found["rows of the widest pass"] = max(step.rows for step in engine.measured.steps)
    differing, same = list[str](), 0
    with new_engine() as engine:
        for made, run_id in enumerate(sorted(together, key=int), 1):
            if time.monotonic() >= until:
                break
            request = draw(int(run_id))
            if outcome(finish(engine, [request])[run_id]) == together[run_id]:
                same += 1
            else:
                begun = "no image" if request.image is None else "an image" if request.mask is None else "a mask"
                differing.append(
                    f"{run_id}: {request.steps} steps, guidance {request.guidance}, {request.sampler}, {begun}"
                )
            found |= {
                "same bytes": f"{same} of {made}",
                "failures": sum(len(together[f"{i}"]) != DIGEST for i in range(made)),
                "first that differ": differing[:8],
                "digests": [together[f"{i}"] for i in range(min(made, 8))],
            }
            tell(found)
    return found


DIGEST = 64
"""The length of a digest, which no failure has."""


def outcome(ended: Finished) -> str:
    """Return the digest of a run's image, or its failure in words."""
    return f"failed: {ended.failure}" if ended.image is None else hashlib.sha256(ended.image.tobytes()).hexdigest()


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
