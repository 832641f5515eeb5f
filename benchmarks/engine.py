"""Compares the engine with three ways of serving many adapters.

    python -m benchmarks.engine --model pocket
    python -m benchmarks.engine --distinct --checks late-arrival          # one check alone
    python -m benchmarks.engine --device cuda --model sdxl

Every comparison is made in one process and one run, rounds interleaved, warm-up excluded, medians given with their
spread, and every image is checked: ours byte for byte against a run made alone, the policies' against ours. Writes JSON
and a plot. The last command is for a GPU machine with torch, transformers, peft and diffusers, and gives the figures
with goals.
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

from benchmarks.engine_checks import CHECKS
from benchmarks.engine_goals import goals
from benchmarks.engine_models import ROOT, BenchmarkModel, make_model
from benchmarks.engine_policies import (
    Policy,
    Result,
    at_its_best,
    bare,
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
}
LABELS = {
    "ours": "Atelier, any adapters in one batch",
    "no adapters": "Atelier, no adapters",
    "preloaded": "diffusers per job, adapters preloaded",
    "one-per-batch": "Atelier's engine, one adapter per batch",
    "load-per-job": "diffusers, load and unload per job",
}
"""What the plot calls each."""
SIZES = {"pocket": 512, "sd15": 512, "sdxl": 1024}
GPU_SETUP = {"distinct": [1, 16, 64], "jobs": 16, "adapters": 64, "rank": 32, "repeats": 1, "checks": "none", "solo": 8}
CPU_SETUP = {"distinct": [1, 8, 16], "jobs": 8, "adapters": 16, "rank": 8, "repeats": 3, "checks": "all", "solo": 16}
"""What is taken where nothing else is said: on a GPU what the goals ask for, in minutes rather than hours."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    options = EngineOptions(
        device=args.device,
        max_rows=args.rows,
        adapter_slots=args.adapters,
        compile=args.compile,
    )
    with tempfile.TemporaryDirectory() as folder:
        benchmark = make_model(
            args.model,
            options,
            Path(folder),
            adapters=args.adapters,
            rank=args.rank,
            side=args.side or SIZES[args.model],
        )
        report: dict[str, Any] = {"machine": _machine(args), "arguments": vars(args)}
        report["throughput"] = throughput(benchmark, args)
        report["checks"] = {
            name: check(benchmark, args) for name, check in CHECKS.items() if args.checks in ("all", name)
        }
        if args.goals and report["throughput"]:
            report["goals"] = goals(benchmark, report["throughput"], args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps(report["throughput"] | report["checks"] | report.get("goals", {}), indent=2, default=str))
    if args.plot and len(report["throughput"]) > 1:
        threads = "" if args.device.startswith("cuda") else f", threads: {torch.get_num_threads()}"
        plot(report["throughput"], args.plot, f"{args.model} {benchmark.side}², {args.steps} steps{threads}")


def throughput(benchmark: BenchmarkModel, args: argparse.Namespace) -> dict[str, Any]:
    """Measure images per second of a closed set of jobs, by the number of distinct adapters.

    Every policy draws in every round.
    """
    wanted = OURS | {name: COMPARED[name] for name in args.policies}
    policies = {name: make(benchmark) for name, make in wanted.items()} if args.distinct else {}
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
        walls, cpus = (
            [theirs.wall_s / own.wall_s for own, theirs in pairs],
            [theirs.cpu_s / own.cpu_s for own, theirs in pairs],
        )
        ratios[f"ours / {name}"] = {
            "wall": round(statistics.median(walls), 2),
            "wall_spread": [round(min(walls), 2), round(max(walls), 2)],
            "cpu": round(statistics.median(cpus), 2),
            "cpu_spread": [round(min(cpus), 2), round(max(cpus), 2)],
        }
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


def plot(table: Mapping[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    counts = [int(adapters) for adapters in table]
    for name, label in LABELS.items():
        if name in table[str(counts[0])]:
            axes.plot(counts, [table[str(count)][name]["images_per_s"] for count in counts], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("distinct LoRA adapters among the jobs")
    axes.set_ylabel("images per second")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    device = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    return {
        "device": device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "when": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=sorted(SIZES), default="pocket")
    parser.add_argument("--side", type=int, default=0, help="pixels; 0 takes the model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, help="at least one per adapter")
    parser.add_argument("--adapters", type=int)
    parser.add_argument(
        "--distinct", type=int, nargs="*", help="adapters among the jobs, a round of each; none: no throughput"
    )
    parser.add_argument("--policies", nargs="*", choices=list(COMPARED), default=list(COMPARED))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int)
    parser.add_argument(
        "--solo", type=int, default=1000, help="so many images of a round are made again alone and compared"
    )
    parser.add_argument("--resident", type=int, default=64, help="adapters placed to show that slots hold them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--policy-threads", type=int, nargs="*", help="each policy runs with each, its fastest counts; none: as ours"
    )
    parser.add_argument("--compile", default="")
    parser.add_argument("--checks", choices=["all", "none", *CHECKS])
    parser.add_argument("--goals", action="store_true", help="the figures with goals also on a CPU, to rehearse them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    on_gpu = args.device.startswith("cuda")
    for name, value in (GPU_SETUP if on_gpu else CPU_SETUP).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.goals |= on_gpu
    args.policy_threads = args.policy_threads or [args.threads]
    what = "engine" if args.distinct else f"engine-{args.checks}"
    label = f"{what}-{args.model}" if on_gpu else what
    args.out = args.out or ROOT / "benchmarks" / "results" / f"{label}.json"
    args.plot = args.plot or ROOT / "benchmarks" / "plots" / f"{label}.png"
    return args


if __name__ == "__main__":
    main()
