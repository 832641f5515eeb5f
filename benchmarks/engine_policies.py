"""Three other ways to serve many adapters, each as fast as its policy allows, beside ours."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.engine_models import BenchmarkModel
from serve_app.engine import AdapterFile, Engine, RunRequest
from serve_app.engine.run import Run
from serve_app.engine.scheduler import Scheduler


class Result(NamedTuple):
    """One closed set of jobs, from all waiting to all made."""

    images: dict[str, np.ndarray]
    latencies: dict[str, float]
    """Seconds from the start to each job's image."""
    wall_s: float
    cpu_s: float
    """Processor seconds of the whole process, every thread: on a shared machine the steadier of the two."""


Policy = Callable[[Sequence[RunRequest]], Result]


def with_threads(policy: Policy, threads: int) -> Policy:
    """Return the policy under its own number of CPU threads: small forwards may be faster with fewer."""

    def run(requests: Sequence[RunRequest]) -> Result:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return policy(requests)
        finally:
            torch.set_num_threads(before)

    return run


def at_its_best(results: Mapping[int, Sequence[Result]]) -> tuple[int, Sequence[Result]]:
    """Return the number of threads whose median is fastest of one policy's results by threads, and those results."""
    return min(results.items(), key=lambda item: statistics.median(result.wall_s for result in item[1]))


def ours(benchmark: BenchmarkModel) -> Policy:
    """Any adapters in one batch."""
    engine = benchmark.engine()
    return lambda requests: drive(engine, requests)


def bare(benchmark: BenchmarkModel) -> Policy:
    """Ours with the adapters left out: what they cost. No policy: its images differ."""
    engine = benchmark.engine()
    return lambda requests: drive(engine, [replace(request, adapter=None) for request in requests])


def one_adapter_per_batch(benchmark: BenchmarkModel) -> Policy:
    """Build our engine with vLLM-Omni's rule: the oldest run's adapter and weight choose the batch.

    It need not be exact, so that its small batches are not padded.
    """
    engine = benchmark.engine(exact=False)
    engine.scheduler = OneAdapterPerBatch(max_runs=benchmark.options.runs, max_rows=benchmark.options.max_rows)
    return lambda requests: drive(engine, requests)


class OneAdapterPerBatch(Scheduler):
    def next_batch(self) -> list[Run]:
        batch = super().next_batch()
        if not batch:
            return []
        head = min(batch, key=lambda run: run.added_at)
        return [
            run
            for run in batch
            if run.request.adapter == head.request.adapter and run.request.scale == head.request.scale
        ]


def set_adapters_per_job(benchmark: BenchmarkModel) -> Policy:
    """Build diffusers' pipeline with `set_adapters` before each job, first in first out.

    Every adapter is loaded beforehand.
    """
    pipeline = _pipeline(benchmark)
    names = {file.id: f"adapter{i}" for i, file in enumerate(benchmark.adapters)}
    for file in benchmark.adapters:
        pipeline.load_lora_weights(str(file.path.parent), weight_name=file.path.name, adapter_name=names[file.id])

    def apply(request: RunRequest) -> None:
        if request.adapter is None:
            pipeline.disable_lora()
            return
        pipeline.enable_lora()
        pipeline.set_adapters(names[request.adapter.id], request.scale)

    return lambda requests: _one_by_one(pipeline, requests, apply, lambda: None)


def load_per_job(benchmark: BenchmarkModel) -> Policy:
    """Diffusers' pipeline, the job's adapter loaded before it and unloaded after it."""
    pipeline = _pipeline(benchmark)

    def apply(request: RunRequest) -> None:
        if isinstance(request.adapter, AdapterFile):
            path = request.adapter.path
            pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="only")
            pipeline.set_adapters("only", request.scale)

    return lambda requests: _one_by_one(pipeline, requests, apply, pipeline.unload_lora_weights)


COMPILED_JOBS = 8
"""Jobs of one call of the compiled pipeline: with guidance as many rows as ours have."""


def compiled(benchmark: BenchmarkModel) -> Policy:
    """Diffusers' pipeline at its fastest: one adapter fused into it, compiled, several jobs a call.

    It is for jobs of one size that all have that adapter; one call draws at one scale and guidance.
    """
    pipeline, (file, *_) = _pipeline(benchmark), benchmark.adapters
    pipeline.load_lora_weights(str(file.path.parent), weight_name=file.path.name)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    backend = "inductor" if benchmark.device.type == "cuda" else "eager"
    pipeline.unet = torch.compile(pipeline.unet, backend=backend)  # pyright: ignore[reportUnknownMemberType]
    return lambda requests: _one_by_one(pipeline, requests, lambda _: None, lambda: None, at_once=COMPILED_JOBS)


def _pipeline(benchmark: BenchmarkModel) -> Any:
    pipeline = copy.deepcopy(benchmark.pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def drive(engine: Engine, requests: Sequence[RunRequest]) -> Result:
    """Draw all the requests at once; the engine takes them as its capacity allows."""
    images: dict[str, np.ndarray] = {}
    latencies: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for ended in engine.step():
            assert ended.image is not None, ended.failure
            images[ended.run_id] = ended.image
            latencies[ended.run_id] = time.perf_counter() - wall
    return Result(images, latencies, time.perf_counter() - wall, time.process_time() - cpu)


def _one_by_one(
    pipeline: Any,
    requests: Sequence[RunRequest],
    apply: Callable[[RunRequest], None],
    unload: Callable[[], None],
    *,
    at_once: int = 1,
) -> Result:
    """Draw one call of the pipeline after the other; several jobs `at_once` are drawn as the first of them asks."""
    images: dict[str, np.ndarray] = {}
    latencies: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    for some in (requests[first : first + at_once] for first in range(0, len(requests), at_once)):
        request = some[0]
        some = [*some, *[request] * (at_once - len(some))]  # a compiled model is compiled for one number of jobs
        apply(request)
        made = pipeline(
            [one.prompt for one in some],
            negative_prompt=[one.negative_prompt for one in some] if request.negative_prompt else None,
            generator=[torch.Generator().manual_seed(one.seed) for one in some],
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            width=request.width,
            height=request.height,
        ).images
        for one, image in zip(some, made, strict=True):
            images[one.run_id], latencies[one.run_id] = np.asarray(image), time.perf_counter() - wall
        unload()
    return Result(images, latencies, time.perf_counter() - wall, time.process_time() - cpu)
