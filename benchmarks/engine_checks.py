"""Measures latency, the wait for a first step, and what adapters cost and their loading delays.

That a batch changes no image, that aborts and bad adapters harm nobody, and that images are those of diffusers, is
asserted by tests/engine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from benchmarks.engine_models import BenchmarkModel
from benchmarks.engine_policies import ours, set_adapters_per_job, with_threads
from serve_app.engine import AdapterFile, Engine, RunRequest

SMALL = 256
"""Pixels of the checks that are about order and bytes, not speed."""


def short_job_behind_long_ones(benchmark: BenchmarkModel, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a 20-step job that arrives behind seven 50-step jobs.

    Its image is compared with one made alone, and with diffusers'.
    """
    small = benchmark._replace(side=min(benchmark.side, SMALL))
    jobs = [
        *small.requests(7, adapters=7, steps=50),
        replace(small.requests(1, adapters=1, steps=20, first=99)[0], adapter=benchmark.adapters[7]),
    ]
    engine, policy = ours(small), set_adapters_per_job(small)
    for one in (engine, policy):
        one(small.requests(2, adapters=2, steps=2))
    policies = {threads: with_threads(policy, threads) for threads in args.policy_threads}
    waits, latencies = list[float](), {threads: list[float]() for threads in policies}
    images: dict[str, np.ndarray] = {}
    for _ in range(args.repeats):
        made = engine(jobs)
        waits.append(made.latencies["99"])
        images["ours"] = made.images["99"]
        for threads, one in policies.items():
            made = one(jobs)
            latencies[threads].append(made.latencies["99"])
            images["diffusers"] = made.images["99"]
    latency = statistics.median(waits)
    medians = {f"diffusers, threads: {threads}": statistics.median(values) for threads, values in latencies.items()}
    return {
        "p50_s": {f"ours, threads: {args.threads}": round(latency, 2)} | {k: round(v, 2) for k, v in medians.items()},
        "times_lower": {name: round(median / latency, 1) for name, median in medians.items()},
        "identical_to_alone": np.array_equal(images["ours"], engine(jobs[-1:]).images["99"]),
        "largest_difference": int(abs(images["ours"].astype(int) - images["diffusers"]).max()),
    }


def enqueue_to_first_step(benchmark: BenchmarkModel, _: argparse.Namespace) -> dict[str, Any]:
    """Time from `add`, at a random moment of a step, to the end of the new run's first step, in steps."""
    import random
    import threading

    engine, chance = loaded(benchmark, runs=4), random.Random(0)
    waits: list[float] = []
    for i in range(20):
        late = benchmark.requests(1, adapters=4, steps=50, first=1000 + i)[0]
        typical = timed(engine.step, benchmark.wall)
        added = list[float]()

        def add(late: RunRequest = late, added: list[float] = added) -> None:
            added.append(time.perf_counter())
            engine.add(late)

        threading.Timer(typical * chance.random(), add).start()
        while engine.progress().get(late.run_id, (0, 0))[0] == 0:
            engine.step()
        waits.append((benchmark.wall() - added[0]) / typical)
        engine.abort(late.run_id)
        engine.step()
    return {
        "median_steps_to_end_of_first": round(statistics.median(waits), 2),
        "waited_steps": round(statistics.median(waits) - 1, 2),
    }


def mixed_over_bare(benchmark: BenchmarkModel, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a full batch with eight adapters over the same batch with none."""
    mixed, bare = loaded(benchmark, runs=8), loaded(benchmark, runs=8, adapters=0)
    ratios = [
        timed(mixed.step, time.process_time) / timed(bare.step, time.process_time) for _ in range(5 * args.repeats)
    ]
    return {"ratio": round(statistics.median(ratios), 3), "spread": [round(min(ratios), 3), round(max(ratios), 3)]}


def loading_during_steps(benchmark: BenchmarkModel, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the step thread's processor time per step, with and without an adapter being loaded.

    The adapter is read and placed for the first time.
    """
    engine = loaded(benchmark, runs=7)
    rounds = [_stall(benchmark, engine, number) for number in range(args.repeats)]
    ratios = [one["while_loading_ms"]["p99"] / one["quiet_ms"]["p99"] for one in rounds]
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    return {"rounds": rounds, "p99_ratio": round(statistics.median(ratios), 3), "spread": spread}


def _stall(benchmark: BenchmarkModel, engine: Engine, number: int) -> dict[str, dict[str, float]]:
    """Thirty steps in peace, and thirty during which ten adapters come in, one after the other."""
    quiet = [timed(engine.step, time.thread_time) for _ in range(30)]
    busy: list[float] = []
    with TemporaryDirectory() as folder:
        for i in range(10):
            unseen = _copy_of(benchmark.adapters[0], Path(folder) / f"{i}.safetensors", 1 + number + i / 100)
            request = replace(benchmark.requests(1, adapters=0, steps=50, first=2000 + i)[0], adapter=unseen)
            (model,) = engine.base_models.values()
            model.pool.read_ahead([unseen])
            busy += [timed(engine.step, time.thread_time) for _ in range(3)]
            engine.add(request)
            engine.abort(request.run_id)
    return {"quiet_ms": _percentiles(quiet), "while_loading_ms": _percentiles(busy)}


CHECKS: dict[str, Callable[[BenchmarkModel, argparse.Namespace], dict[str, Any]]] = {
    "late-arrival": short_job_behind_long_ones,
    "first-step": enqueue_to_first_step,
    "adapter-cost": mixed_over_bare,
    "adapter-loading": loading_during_steps,
}


def loaded(benchmark: BenchmarkModel, *, runs: int, adapters: int = 8) -> Engine:
    """Return an engine in the middle of long runs, warm."""
    engine = benchmark.engine()
    for request in benchmark.requests(runs, adapters=adapters and min(adapters, runs), steps=999):
        engine.add(request)
    while min(done for done, _ in engine.progress().values()) < 2:
        engine.step()
    return engine


def _copy_of(adapter: AdapterFile, path: Path, factor: float) -> AdapterFile:
    """Return the same adapter with its numbers times `factor`: another identity."""
    save_file({name: (tensor.float() * factor).contiguous() for name, tensor in load_file(adapter.path).items()}, path)
    return AdapterFile(f"{adapter.id}*{factor}", path)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1e3, 2) for p in (50, 99)}


def timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    work()
    return clock() - began
