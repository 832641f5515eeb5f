"""The engine against three ways of serving many adapters: `python -m benchmarks.engine --model pocket`.

Every comparison is made in one process and one run, rounds interleaved, warm-up excluded, medians told with their spread, and
every image is checked: ours byte for byte against a run made alone, the rivals' against ours. Writes JSON and a plot.
On a GPU machine: `python -m benchmarks.engine --device cuda --model sdxl --random-weights`.
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
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine_checks import CHECKS
from benchmarks.engine_rivals import Result, Rival, load_per_job, one_adapter_per_batch, ours, set_adapters_per_job
from benchmarks.engine_subjects import ROOT, Subject, make_subject
from serve_app.engine import EngineOptions, RunRequest

RIVALS: dict[str, Callable[[Subject], Rival]] = {
    "ours": ours,
    "B1 set_adapters per job": set_adapters_per_job,
    "B2 one adapter per batch": one_adapter_per_batch,
    "B3 load per job": load_per_job,
}
SIZES = {"pocket": 512, "sd15": 512, "sdxl": 1024}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    options = EngineOptions(device=args.device, max_rows=args.rows, compile=args.compile, exact=not args.inexact)
    with tempfile.TemporaryDirectory() as folder:
        subject = make_subject(
            args.model,
            options,
            Path(folder),
            adapters=args.adapters,
            rank=args.rank,
            side=args.side or SIZES[args.model],
        )
        report: dict[str, Any] = {"machine": _machine(args), "arguments": vars(args)}
        report["throughput"] = throughput(subject, args)
        report["checks"] = {
            name: check(subject, args) for name, check in CHECKS.items() if args.checks in ("all", name)
        }
        if args.device.startswith("cuda"):
            report["roof"] = roof(subject, report["throughput"], args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps(report["throughput"] | report["checks"], indent=2, default=str))
    if args.plot and len(report["throughput"]) > 1:
        plot(report["throughput"], args.plot, f"{args.model} {subject.side}², {args.steps} steps")


def throughput(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Images per second of a closed set of jobs for each number of distinct adapters, every rival in every round."""
    rivals = {name: make(subject) for name, make in RIVALS.items()} if args.distinct else {}
    table: dict[str, Any] = {}
    for adapters in args.distinct:
        jobs = max(args.jobs, adapters)
        requests = subject.requests(jobs, adapters=adapters, steps=args.steps)
        for rival in rivals.values():
            rival(subject.requests(2, adapters=adapters, steps=2))
        rounds: dict[str, list[Result]] = {name: [] for name in rivals}
        for _ in range(args.repeats):
            for name, rival in rivals.items():
                rounds[name].append(rival(requests))
        table[str(adapters)] = {name: _speed(results, jobs) for name, results in rounds.items()} | _ratios(rounds)
        table[str(adapters)]["images"] = _compare(rounds, rivals["ours"], requests)
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
    """Ours over each rival, round by round (neighbours in time), the median and the spread."""
    ratios: dict[str, Any] = {}
    for name in [name for name in rounds if name != "ours"]:
        pairs = list(zip(rounds["ours"], rounds[name], strict=True))
        walls, cpus = (
            [theirs.wall_s / own.wall_s for own, theirs in pairs],
            [theirs.cpu_s / own.cpu_s for own, theirs in pairs],
        )
        ratios[f"ours / {name[:2]}"] = {
            "wall": round(statistics.median(walls), 2),
            "wall_spread": [round(min(walls), 2), round(max(walls), 2)],
            "cpu": round(statistics.median(cpus), 2),
            "cpu_spread": [round(min(cpus), 2), round(max(cpus), 2)],
        }
    return ratios


def _compare(rounds: Mapping[str, Sequence[Result]], alone: Rival, requests: Sequence[RunRequest]) -> dict[str, Any]:
    """How many of our images are byte for byte those of a run alone, and how far each rival's are from ours (8-bit levels)."""
    mixed = rounds["ours"][-1].images
    solo = {request.key: alone([request]).images[request.key] for request in requests}
    same = sum(np.array_equal(mixed[key], solo[key]) for key in mixed)
    far = {
        name[:2]: max(int(abs(results[-1].images[key].astype(int) - mixed[key]).max()) for key in mixed)
        for name, results in rounds.items()
        if name != "ours"
    }
    return {"identical_to_alone": f"{same}/{len(mixed)}", "largest_difference": far}


def roof(subject: Subject, table: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Our useful FLOPs (denoiser only, adapters and padding not counted) as a share of this device's own matrix speed."""
    side = 8192
    a, b = (torch.randn(side, side, device=args.device, dtype=subject.options.torch_dtype) for _ in range(2))
    best = 0.0
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        torch.cuda.synchronize()
        best = max(best, 10 * 2 * side**3 / (time.perf_counter() - began))
    with FlopCounterMode(display=False) as counter:
        subject.pipeline("x", num_inference_steps=1, width=subject.side, height=subject.side, output_type="latent")
    per_image = counter.get_total_flops() * args.steps
    speed = {adapters: row["ours"]["images_per_s"] for adapters, row in table.items()}
    return {
        "matrix_tflops": best / 1e12,
        "tflop_per_image": per_image / 1e12,
        "share": {adapters: round(images * per_image / best, 3) for adapters, images in speed.items()},
    }


def plot(table: Mapping[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    counts = [int(adapters) for adapters in table]
    for name in RIVALS:
        axes.plot(counts, [table[str(count)][name]["images_per_cpu_s"] for count in counts], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("distinct LoRA adapters among the jobs")
    axes.set_ylabel("images per processor second")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
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
    parser.add_argument(
        "--random-weights", action="store_true", help="sd15 and sdxl always have them; said for the record"
    )
    parser.add_argument("--side", type=int, default=0, help="pixels; 0 takes the model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--distinct", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", default="")
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--checks", default="all", help="all, none, or one of " + ", ".join(CHECKS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "engine.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "benchmarks" / "plots" / "engine.png")
    return parser.parse_args()


if __name__ == "__main__":
    main()
