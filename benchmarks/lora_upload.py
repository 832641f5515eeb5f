"""Measures the time from the upload of a LoRA to the first image with it, through `atelier up`.

    .venv/bin/python -m benchmarks.lora_upload [--rounds 7] [--steps 20] [--side 512]

Each round adds a LoRA of the pocket model whose weights the service has never seen, draws and downloads one image with it, then a
second one. Beside the seconds stands the processor time of all the service's processes: on a busy machine the steadier figure.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file

from serve_app.client import Client
from serve_app.settings import ROOT
from tests.support import free_port

LORA = ROOT / "models" / "pocket" / "loras" / "outline.safetensors"
START_LIMIT_S, STOP_LIMIT_S = 300.0, 60.0
GOAL_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side", type=int, default=512)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="lora-upload-") as folder,
        _service(Path(folder)) as (ready, pid),
        Client(ready["base_url"], ready["keys"]["both"]) as client,
    ):
        rounds = [_round(client, pid, Path(folder), number, options) for number in range(options.rounds)]
    _report(rounds, options)


@contextmanager
def _service(folder: Path) -> Generator[tuple[dict[str, Any], int]]:
    """`atelier up` on a free port, until the block ends: its ready file, and its process."""
    ready_file, log = folder / "ready.json", folder / "log"
    arguments = ("--port", str(free_port()), "--data-dir", str(folder / "var"), "--ready-file", str(ready_file))
    # no samples: one of the first LoRA would be drawn beside the second image
    environment = os.environ | {"ATELIER_LORA_SAMPLES": "false", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        command = [Path(sys.executable).with_name("atelier"), "up", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait_until(lambda: ready_file.exists() or process.poll() is not None, START_LIMIT_S)
        if process.poll() is not None:
            sys.exit(log.read_text())
        yield json.loads(ready_file.read_text()), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_LIMIT_S)


def _wait_until(is_true: Callable[[], bool], limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > ends:
            raise TimeoutError(f"the service did not start in {limit_s:g} s")
        time.sleep(0.1)


def _round(client: Client, pid: int, folder: Path, number: int, options: argparse.Namespace) -> dict[str, float]:
    """Seconds, and seconds of processor time, of each part."""
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
        client.generate("a red circle", lora_id=lora.id, seed=number, steps=options.steps, **size).wait().images[
            0
        ].pil()
        part(name)
    spent["together"] = spent["upload and check"] + spent["first image"]
    client.loras.delete(lora.id)
    sys.stdout.write(f"round {number + 1}: {', '.join(f'{name} {value:.2f}' for name, value in spent.items())}\n")
    sys.stdout.flush()
    return spent


def _processor_seconds(pid: int) -> float:
    """Of all processes of the service that live, and of their children that ended."""
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
        lines.append(f"| {name} | {_spread(values[name])} | {_spread(processor)} |")
    sys.stdout.write("\n".join(lines) + "\n")


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    main()
