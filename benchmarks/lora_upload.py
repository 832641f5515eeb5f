"""Measures the time from the upload of a LoRA to the first image with it, through `atelier up`.

    .venv/bin/python -m benchmarks.lora_upload [--rounds 7] [--steps 20] [--side 512]

Each round adds a LoRA of the pocket model whose weights the service has never seen, draws and downloads one image with
it, then a second one. Beside the seconds stands the processor time of all the service's processes: on a busy machine
the steadier figure.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from safetensors.torch import load_file, save_file

from benchmarks.serve import atelier_up
from benchmarks.servers import spread
from serve_app.client import Client
from serve_app.settings import ROOT, Settings

LORA = ROOT / "models" / "pocket" / "loras" / "outline.safetensors"
GOAL_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-upload-") as name:
        folder = Path(name)
        # no samples: one of the first LoRA would be drawn beside the second image
        settings = Settings(data_dir=folder / "var", lora_samples=False)
        with atelier_up(settings, folder, worker_niceness=0) as server:
            ready = json.loads((folder / "ready.json").read_text())
            with Client(ready["base_url"], ready["keys"]["both"]) as client:
                rounds = [_round(client, server.pid, folder, number, options) for number in range(options.rounds)]
    _report(rounds, options)


def _round(client: Client, pid: int, folder: Path, number: int, options: argparse.Namespace) -> dict[str, float]:
    """Return seconds, and seconds of processor time, of each part."""
    path = folder / f"round-{number}.safetensors"
    save_file({name: tensor * (1 + 0.01 * number) for name, tensor in load_file(LORA).items()}, path)
    spent: dict[str, float] = {}
    began, cpu = time.perf_counter(), _processor_seconds(pid)

    def part(name: str) -> None:
        nonlocal began, cpu
        now, used = time.perf_counter(), _processor_seconds(pid)
        spent[name], spent[f"{name}, processor"] = now - began, used - cpu
        began, cpu = now, used

    lora = client.loras.add(path, base_model="pocket")
    part("upload and check")
    for name in ("first image", "second image"):
        size = {"width": options.side, "height": options.side}
        job = client.generate("a red circle", lora_id=lora.id, seed=number, steps=options.steps, **size).wait()
        job.images[0].pil()
        part(name)
    spent["together"] = spent["upload and check"] + spent["first image"]
    client.loras.delete(lora.id)
    sys.stdout.write(f"round {number + 1}: {', '.join(f'{name} {value:.2f}' for name, value in spent.items())}\n")
    sys.stdout.flush()
    return spent


def _processor_seconds(pid: int) -> float:
    """Return the processor time of the service's living processes and of their children that ended."""
    service = psutil.Process(pid)
    total = 0.0
    for process in (service, *service.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _report(rounds: Sequence[dict[str, float]], options: argparse.Namespace) -> None:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for spent in rounds:
        for name, seconds in spent.items():
            values[name].append(seconds)
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        f"\n{options}, {os.cpu_count()} cores, load {load}; goal {GOAL_S:g} s together",
        "| | s | processor s |",
        "|---|---|---|",
    ]
    for name in ("upload and check", "first image", "together", "second image"):
        processor = values.get(f"{name}, processor") or [
            spent["upload and check, processor"] + spent["first image, processor"] for spent in rounds
        ]
        lines.append(f"| {name} | {spread(values[name])} | {spread(processor)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
