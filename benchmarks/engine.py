"""Compares the engine with three ways of serving many adapters.

    python -m benchmarks.engine

Every comparison is made in one process and one run, rounds interleaved, warm-up excluded, medians given with their
spread, and every image is checked: ours byte for byte against a run made alone, the policies' against ours. Writes
JSON. `benchmarks.gpu` measures a GPU.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_models import ROOT, BenchmarkModel, make_model
from benchmarks.engine_policies import (
    Policy,
    Result,
    at_its_best,
    bare,
    compiled,
    load_per_job,
    one_adapter_per_batch,
    ours,
    set_adapters_per_job,
    with_threads,
)
from serve_app.engine import EngineOptions, RunRequest

OURS: dict[str, Callable[[BenchmarkModel], Policy]] = {"ours": ours, "no adapters": bare}
COMPARED: dict[str, Callable[[BenchmarkModel], Policy]] = {
    "preloaded": set_adapters_per_job,
    "one-per-batch": one_adapter_per_batch,
    "load-per-job": load_per_job,
    "compiled": compiled,
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    options = EngineOptions(device="cpu", adapter_slots=args.adapters)
    with tempfile.TemporaryDirectory() as folder:
        benchmark = make_model("pocket", options, Path(folder), adapters=args.adapters, rank=8, side=args.side)
        report: dict[str, Any] = {"machine": _machine(), "arguments": vars(args)}
        report["throughput"] = throughput(benchmark, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps(report["throughput"], indent=2))


def throughput(benchmark: BenchmarkModel, args: argparse.Namespace) -> dict[str, Any]:
    """Measure images per second of a closed set of jobs, by the number of distinct adapters.

    Every policy draws in every round.
    """
    wanted = OURS | {name: COMPARED[name] for name in args.policies}
    policies = {name: make(benchmark) for name, make in wanted.items()}
    table: dict[str, Any] = {}
    for adapters in args.distinct:
        jobs = max(args.jobs, adapters)
        requests = benchmark.requests(jobs, adapters=adapters, steps=args.steps)
        for policy in policies.values():
            policy(benchmark.requests(2, adapters=adapters, steps=2))
        tried: dict[str, dict[int, list[Result]]] = {
            name: {threads: [] for threads in (args.policy_threads if name in COMPARED else [args.threads])}
            for name in policies
        }
        entries = [(name, threads) for name, counts in tried.items() for threads in counts]
        for number in range(args.repeats):
            for name, threads in entries:
                result = with_threads(policies[name], threads)(requests)
                tried[name][threads].append(result)
                print(f"{adapters} adapters, round {number + 1}: {name} {result.wall_s:.1f} s", flush=True)
        best = {name: at_its_best(results) for name, results in tried.items()}
        rounds = {name: results for name, (_, results) in best.items()}
        table[str(adapters)] = {
            name: _speed(results, jobs) | {"threads": threads} for name, (threads, results) in best.items()
        }
        table[str(adapters)] |= _ratios(rounds)
        table[str(adapters)]["images"] = _compare(rounds, policies["ours"], requests[: args.solo])
        print(adapters, json.dumps(table[str(adapters)]), flush=True)
    return table


def _speed(results: Sequence[Result], jobs: int) -> dict[str, Any]:
    walls, cpus = [jobs / result.wall_s for result in results], [jobs / result.cpu_s for result in results]
    return {
        "images_per_s": round(statistics.median(walls), 4),
        "spread": [round(min(walls), 4), round(max(walls), 4)],
        "images_per_cpu_s": round(statistics.median(cpus), 4),
        "p50_latency_s": round(
            statistics.median(statistics.median(result.latencies.values()) for result in results), 3
        ),
    }


def _ratios(rounds: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Ours over each policy, round by round (neighbors in time), the median and the spread."""
    ratios: dict[str, Any] = {}
    for name in [name for name in rounds if name in COMPARED]:
        pairs = list(zip(rounds["ours"], rounds[name], strict=True))
        ratios[f"ours / {name}"] = one = dict[str, Any]()
        for clock, field in (("wall", "wall_s"), ("cpu", "cpu_s")):
            times = [getattr(theirs, field) / getattr(own, field) for own, theirs in pairs]
            one[clock] = round(statistics.median(times), 2)
            one[f"{clock}_spread"] = [round(min(times), 2), round(max(times), 2)]
    return ratios


def _compare(rounds: Mapping[str, Sequence[Result]], alone: Policy, requests: Sequence[RunRequest]) -> dict[str, Any]:
    """Count our images that equal a run alone byte for byte, and measure how far each policy's differ.

    Differences are in 8-bit levels, from our images.
    """
    mixed = rounds["ours"][-1].images
    solo = {request.run_id: alone([request]).images[request.run_id] for request in requests}
    same = sum(np.array_equal(mixed[key], solo[key]) for key in solo)
    far = {
        name: max(int(abs(results[-1].images[key].astype(int) - mixed[key]).max()) for key in mixed)
        for name, results in rounds.items()
        if name in COMPARED
    }
    return {"identical_to_alone": f"{same}/{len(solo)}", "largest_difference": far}


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "when": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=512, help="pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8, help="at least one per adapter")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument(
        "--distinct", type=int, nargs="+", default=[1, 8, 16], help="adapters among the jobs, a round of each"
    )
    parser.add_argument("--policies", nargs="*", choices=list(COMPARED), default=list(COMPARED)[:3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--solo", type=int, default=16, help="how many images of a round are made again alone and compared"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--policy-threads", type=int, nargs="*", help="each policy runs with each, its fastest counts; none: as ours"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "var" / "engine.json")
    args = parser.parse_args()
    args.policy_threads = args.policy_threads or [args.threads]
    return args


if __name__ == "__main__":
    main()
