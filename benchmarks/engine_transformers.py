"""Compares images a second of diffusion transformers: mixed LoRAs in one batch, one LoRA, and diffusers job by job.

    .venv/bin/python -m benchmarks.engine_transformers [--side 256] [--jobs 8] [--turns 4] [--threads 2]

The models are Z-Image's and FLUX.2 klein's true architectures with random weights, few layers and narrow ones, so that
a turn takes seconds; their LoRAs change attention and feed-forward layers. In each turn everyone draws the same jobs,
one after another, and ratios are taken turn by turn. diffusers has its prompts encoded and its LoRAs loaded beforehand,
and draws with the threads that are fastest; once with `set_adapters` before each job, and once without any LoRA, which
is as fast as one merged into the weights beforehand, for nothing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_models import PROMPTS
from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from tests.engine.diffusers_reference import open_pipeline
from tests.engine.run_engine import finish
from tests.engine.tiny_flux2_klein import BLOCK_LINEARS, write_flux2_klein
from tests.engine.tiny_z_image import write_z_image
from tests.engine.true_models import ATTENTION, random_adapter

Z_IMAGE_LINEARS = (*ATTENTION, "w1", "w2", "w3")
RANK = 16
STEPS = {"Z-Image": 8, "FLUX.2 klein": 4}
"""Steps of the distilled models, which draw without guidance."""

Draw = Callable[[], object]


def seconds(draw: Draw, threads: int) -> float:
    torch.set_num_threads(threads)
    began = time.perf_counter()
    draw()
    return time.perf_counter() - began


def diffusers_draw(pipeline: Any, jobs: Sequence[RunRequest], *, adapted: bool) -> Draw:
    embeds = cache(lambda prompt: pipeline.encode_prompt(prompt)[0])
    for job in jobs:
        embeds(job.prompt)

    def draw() -> None:
        for job in jobs:
            if adapted and job.adapter is not None:
                pipeline.set_adapters(job.adapter.id, job.scale)
            pipeline(
                prompt_embeds=embeds(job.prompt), num_inference_steps=job.steps, width=job.width, height=job.height,
                guidance_scale=0.0 if "ZImage" in type(pipeline).__name__ else 1.0,
                generator=torch.Generator().manual_seed(job.seed),
            )  # fmt: skip

    return draw


def compare(name: str, folder: Path, targets: Sequence[str], args: argparse.Namespace) -> None:
    plain, adapted = open_pipeline(folder), open_pipeline(folder)
    files = [
        random_adapter(plain.transformer, folder / f"lora{i}.safetensors", RANK, i, targets, "transformer")
        for i in range(args.jobs)
    ]
    for i, file in enumerate(files):
        adapted.load_lora_weights(str(folder), weight_name=file.name, adapter_name=f"lora{i}")
    mixed = [
        RunRequest(
            run_id=f"{i}", prompt=PROMPTS[i % len(PROMPTS)], adapter=AdapterFile(f"lora{i}", file), scale=0.75, seed=i,
            steps=STEPS[name], guidance=1.0, width=args.side, height=args.side,
        )
        for i, file in enumerate(files)
    ]  # fmt: skip
    one = [replace(job, adapter=mixed[0].adapter) for job in mixed]
    options = EngineOptions(device="cpu", max_rows=args.jobs, max_runs=args.jobs, threads=args.threads)
    with Engine.load(folder, options) as engine:
        engines = {"mixed LoRAs": lambda: finish(engine, mixed), "one LoRA": lambda: finish(engine, one)}
        theirs: dict[str, Draw] = {
            "diffusers, set_adapters": diffusers_draw(adapted, mixed, adapted=True),
            "diffusers, no LoRA": diffusers_draw(plain, mixed, adapted=False),
        }
        for draw in engines.values():  # what keeps bits is measured here, and no turn waits for it
            seconds(draw, args.threads)
        best = {
            draws: min((1, args.threads), key=lambda threads, draw=draw: seconds(draw, threads))
            for draws, draw in theirs.items()
        }
        turns: dict[str, list[float]] = {each: [] for each in (*engines, *theirs)}
        for _ in range(args.turns):
            for each, draw in {**engines, **theirs}.items():
                turns[each].append(seconds(draw, best.get(each, args.threads)))
    report(name, turns, best, args.jobs)


def report(name: str, turns: Mapping[str, Sequence[float]], best: Mapping[str, int], jobs: int) -> None:
    mixed = turns["mixed LoRAs"]
    for each, times in turns.items():
        speed = [jobs / taken for taken in times]
        ratios = [taken / ours for taken, ours in zip(times, mixed, strict=True)]
        print(
            f"{name}: {each}{f' ({best[each]} threads)' if each in best else ''}: {statistics.median(speed):.2f} images/s"
            f" ({min(speed):.2f} to {max(speed):.2f}); mixed LoRAs are {statistics.median(ratios):.2f} times as fast"
            f" ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=256, help="pixels")
    parser.add_argument("--jobs", type=int, default=8, help="images of a turn, each with a LoRA of its own")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        z_image = write_z_image(Path(home) / "z-image", dim=256, heads=4, layers=3)
        compare("Z-Image", z_image, Z_IMAGE_LINEARS, args)
        klein = write_flux2_klein(Path(home) / "klein", distilled=True, heads=12, blocks=2)
        compare("FLUX.2 klein", klein, BLOCK_LINEARS, args)


if __name__ == "__main__":
    main()
