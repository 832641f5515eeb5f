"""Measures the engine on one GPU, piece by piece, and writes one report: `gpu.md` and `gpu.json`.

    python -m benchmarks.gpu                      # again and again, until it says that nothing is left
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --only trace-sdxl    # also what was measured before
    python -m benchmarks.gpu --tiny               # every piece on a CPU, with tiny models and figures that mean nothing

It needs torch, diffusers, transformers, peft, safetensors, numpy and pillow, this checkout, and no weights: the models
have the true size of SD 1.5 and SDXL and random numbers. Where diffusers is missing and nothing can be downloaded,
carry its wheel:

    pip download --no-deps --dest wheels diffusers==0.42.1                              # here
    pip install --no-deps --no-index --find-links wheels --target site diffusers        # there
    PYTHONPATH=site python -m benchmarks.gpu --out FOLDER

One call takes at most `--minutes` (9). Each piece runs in a process of its own, and what it found is in `gpu.json` of
the folder (`var/gpu`) at once, so that a later call, or another machine that was given the file, goes on with what is
missing. A piece that fails says so in the report, and is tried again after those that were never tried. Where the
variable OUT names a folder, both files are copied there.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_models import ROOT
from benchmarks.gpu_pieces import PIECES, Piece, Setup

SHORTEST = 60.0
"""Seconds: no piece is started with less time left."""
CARD = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,power.limit"


GOALS = (
    ("G1: images/s, SDXL 1024², 20 steps, 16 adapters", "speed-sdxl", "images/s", "1.25, 1.55, 1.75"),
    ("G1: share of the bf16 matrix roof", "speed-sdxl", "roof: share", "0.36, 0.44, 0.50"),
    ("G2: images/s, SD 1.5 512², 20 steps, 32 adapters", "speed-sd15", "images/s", "8, 10.5, 12.5"),
    ("G2: share of the bf16 matrix roof", "speed-sd15", "roof: share", "0.28, 0.37, 0.44"),
    ("G3: kept of no adapters, SDXL", "speed-sdxl", "kept of no adapters", "0.85, 0.92, 0.96"),
    ("G3: kept of no adapters, SD 1.5", "speed-sd15", "kept of no adapters", "0.85, 0.92, 0.96"),
    ("G4: kept of one adapter, SDXL", "speed-sdxl", "kept of one adapter", "0.93, 0.98, 1.0"),
    ("G4: kept of one adapter, SD 1.5", "speed-sd15", "kept of one adapter", "0.93, 0.98, 1.0"),
    ("G5: over one adapter per batch, SD 1.5", "one-per-batch-sd15", "times", "2, 3, 4"),
    ("G5: over one adapter per batch, SDXL", "one-per-batch-sdxl", "times", "1.3, 1.6, 1.9"),
    ("G6: over diffusers per job, SD 1.5", "preloaded-sd15", "times", "3, 4"),
    ("G6: over diffusers per job, SDXL", "preloaded-sdxl", "times", "2, 3"),
    ("G7: resident adapters, SD 1.5 rank 32", "slots-sd15", "slots", "500, 1000"),
    ("G7: resident adapters, SDXL rank 32", "slots-sdxl", "slots", "200, 400"),
    ("G8: host to slot, SDXL rank 32, ms at most", "slots-sdxl", "to slot ms", "20, 5, 3"),
)
"""What is asked; the piece, and the keys of its result with colons between them; floor, aim and stretch."""


def main() -> None:
    args = _arguments()
    if args.list:
        print("\n".join(f"{piece.name:20} {piece.what}" for piece in PIECES))
        return
    deadline = time.monotonic() + 60 * args.minutes
    for piece in [piece for piece in PIECES if piece.name in args.only] if args.only else _left(args.out):
        if deadline - time.monotonic() < SHORTEST:
            break
        print(f"== {piece.name}: {piece.what}", flush=True)
        _measure_apart(piece, args, deadline)
    left = [piece.name for piece in _left(args.out)]
    print(f"{args.out / 'gpu.md'}; left: {', '.join(left) or 'nothing'}")


def _left(out: Path) -> list[Piece]:
    """Return the pieces never tried, then those that failed."""
    known = _known(out)
    never = [piece for piece in PIECES if piece.name not in known]
    return never + [piece for piece in PIECES if "failure" in known.get(piece.name, {})]


def _measure_apart(piece: Piece, args: argparse.Namespace, deadline: float) -> None:
    """Measure in a process of its own, so that a lost device, a hang or a lack of memory costs this piece alone."""
    way = "spawn" if torch.cuda.is_available() else "fork"  # a forked process cannot use CUDA
    arguments = piece.name, Setup(args.tiny), args.out
    context: Any = multiprocessing.get_context(way)
    process = context.Process(target=measure, args=arguments)
    process.start()
    process.join(deadline - time.monotonic())
    process.kill()
    process.join()
    if process.exitcode:
        _keep(
            args.out,
            piece.name,
            {"failure": f"its process ended with {process.exitcode}; -9: killed, for time or memory"},
        )


def measure(name: str, setup: Setup, out: Path) -> None:
    """Measure a piece, and write the report with what it found or how it failed."""
    (piece,) = (piece for piece in PIECES if piece.name == name)
    began = time.monotonic()
    try:
        one: dict[str, Any] = {"found": piece.measure(setup, piece.model)}
    except Exception:  # noqa: BLE001  the report tells it, and the next piece runs
        one = {"failure": traceback.format_exc()}
    one |= {"seconds": round(time.monotonic() - began, 1), "card": _card(setup)}
    if not setup.tiny:
        one["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    _keep(out, piece.name, one)


def _card(setup: Setup) -> dict[str, str]:
    """Return what the driver says of the card, at this moment."""
    if setup.tiny:
        return {"name": "a CPU, with tiny models"}
    command = ["nvidia-smi", f"--query-gpu={CARD}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"}
    return dict(zip(CARD.split(","), told.split(", "), strict=True))


def _known(out: Path) -> dict[str, dict[str, Any]]:
    file = out / "gpu.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _keep(out: Path, name: str, one: Mapping[str, Any]) -> None:
    """Write the report with what a piece found."""
    known = {**_known(out), name: json.loads(json.dumps(one, default=str))}
    pieces = {piece.name: known[piece.name] for piece in PIECES if piece.name in known}
    out.mkdir(parents=True, exist_ok=True)
    for file, text in (("gpu.json", json.dumps(pieces, indent=2)), ("gpu.md", report(pieces))):
        (out / "part").write_text(text + "\n")
        (out / "part").replace(out / file)
        if os.environ.get("OUT"):
            shutil.copy(out / file, os.environ["OUT"])


def report(pieces: Mapping[str, Any]) -> str:
    """Return the report in Markdown: what has goals, then everything that each piece found."""
    cards = dict.fromkeys(one["card"]["name"] for one in pieces.values() if "card" in one)
    lines = [f"# The engine on {' and '.join(cards) or 'no card'}", ""]
    lines += ["| goal | floor, aim, stretch | measured |", "|---|---|---|"]
    for goal, piece, path, levels in GOALS:
        value = pieces.get(piece, {}).get("found", {})
        for key in path.split(": "):
            value = value.get(key, {})
        lines.append(f"| {goal} | {levels} | {value or 'not measured'} |")
    for name, one in pieces.items():
        lines += ["", f"## {name}", ""]
        if "failure" in one:
            lines += ["Failed:", "", "```", one["failure"].strip(), "```", ""]
        rest = {key: value for key, value in one.items() if key not in ("found", "failure")}
        lines += ["| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in _flat(one.get("found", {}) | rest)]
    return "\n".join(lines)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}: ")
        else:
            yield prefix + key, item


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "var" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="*", choices=[piece.name for piece in PIECES], default=[], metavar="PIECE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
