"""Measures the engine on one GPU in eleven minutes, piece by piece, into `benchmarks/gpu/<card>.json`.

    python -m benchmarks.gpu                      # again and again, until it says that nothing is left
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --only speed-sdxl    # also what was measured before
    python -m benchmarks.gpu --tiny               # every piece on a CPU, with tiny models and figures that mean nothing
    python -m benchmarks.gpu_tables               # then: the tables of RESULTS.md

It needs torch with its Triton, diffusers, transformers, peft, safetensors, numpy, pillow and this checkout; neither Ray
nor Redis, and no weights: models have the true size and random numbers. Where torch, transformers and peft are there,
and nothing can be downloaded, carry these wheels:

    pip download --no-deps --dest wheels diffusers==0.42.1                              # here; 6 MB, pure Python
    pip install --no-deps --no-index --find-links wheels --target site diffusers        # there
    PYTHONPATH=site python -m benchmarks.gpu

diffusers imports filelock, huggingface_hub, numpy, pillow, regex, requests and safetensors: `pip show` there says which
of them to carry too. `compiled-sdxl` also takes a C compiler.

Pieces come in order of what is unknown: the first seven take ten minutes together. Each runs in a process of its own
with a limit, and what it found is in the file at once, so that a later call, or another machine that was given the
file, goes on with what is missing. Then come pieces that failed, and those measured with another engine's code. Where
the variable OUT names a folder, the file is copied there. Where a command may take ten minutes at most:
`--minutes 9.5`, twice.
"""

import argparse
import hashlib
import multiprocessing
import re
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_models import ROOT
from benchmarks.gpu_pieces import PIECES, Piece, Setup, Skipped
from benchmarks.gpu_tables import RECORDS, read

SHORTEST_S = 40.0
"""No piece is started with less time left."""
TINY_LIMIT_S = 120.0
CARD = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,power.limit"
LAST_LINES = 12
"""So many lines of a failed piece's traceback are kept."""


def main() -> None:
    args = _arguments()
    if args.list:
        print("\n".join(f"{piece.name:20} {piece.limit_s:4} s  {piece.what}" for piece in PIECES))
        return
    until = time.monotonic() + 60 * args.minutes
    file = args.out / f"{_slug(_card(tiny=args.tiny)['name'])}.json"
    for piece in [piece for piece in PIECES if piece.name in args.only] if args.only else left(file):
        if until - time.monotonic() < (0 if args.tiny else SHORTEST_S):
            break
        print(f"== {piece.name}: {piece.what}", flush=True)
        limit = TINY_LIMIT_S if args.tiny else piece.limit_s
        _measure_apart(piece, Setup(args.tiny, file, piece.name, min(until, time.monotonic() + limit)))
        one = read(file)[piece.name]
        told = one.get("skipped") or " | ".join(one.get("failure", "measured").splitlines()[-2:])
        print(f"   {told}, {one['seconds']} s", flush=True)
    print(f"{file}; left: {', '.join(piece.name for piece in left(file)) or 'nothing'}")


def left(file: Path) -> list[Piece]:
    """Return the pieces never tried, then those that failed, those of another engine's code, and skipped ones."""
    known, code = read(file), engine_code()
    never = [piece for piece in PIECES if piece.name not in known]
    failed = [piece for piece in PIECES if "failure" in known.get(piece.name, {})]
    stale = [piece for piece in PIECES if known.get(piece.name, {}).get("engine", code) != code]
    skipped = [piece for piece in PIECES if "skipped" in known.get(piece.name, {})]
    return list(dict.fromkeys((*never, *failed, *stale, *skipped)))


def engine_code() -> str:
    """Return what names the engine's code."""
    texts = (path.read_bytes() for path in sorted((ROOT / "serve_app" / "engine").rglob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


def _measure_apart(piece: Piece, setup: Setup) -> None:
    """Measure in a process of its own, so that a lost device, a hang or a lack of memory costs this piece alone.

    It is spawned: one that is forked would inherit CUDA, and could not use it.
    """
    began = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(piece.name, setup))
    process.start()
    process.join(max(0.0, setup.until - time.monotonic()) + (0.0 if setup.tiny else 5.0))  # it may end by itself
    is_cut = process.is_alive()
    process.kill()
    process.join()
    if process.exitcode:
        why = "cut at its limit" if is_cut else f"its process ended with {process.exitcode}"
        known = read(setup.file).get(piece.name, {})
        setup.keep(known.get("found", {}), failure=why, seconds=round(time.monotonic() - began, 1))


def measure(name: str, setup: Setup) -> None:
    """Measure a piece, and write what it found or how it failed, with its seconds without imports."""
    (piece,) = (piece for piece in PIECES if piece.name == name)
    began = time.monotonic()
    told: dict[str, Any] = {}
    found: dict[str, Any] = {}
    try:
        if not setup.tiny and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA card")
        found = piece.measure(setup, piece.model)
    except Skipped as reason:
        told["skipped"] = str(reason)
    except Exception:  # noqa: BLE001  the record tells it, and the next piece runs
        told["failure"] = "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:])
        found = read(setup.file).get(name, {}).get("found", {})
    if torch.cuda.is_available():
        told["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    told |= {"seconds": round(time.monotonic() - began, 1), "at": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())}
    setup.keep(found, **told, engine=engine_code(), card=_card(tiny=setup.tiny))


def _card(*, tiny: bool) -> dict[str, str]:
    """Return what the driver says of the card, at this moment."""
    if tiny:
        return {"name": "rehearsal"}
    command = ["nvidia-smi", f"--query-gpu={CARD}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"}
    return dict(zip(CARD.split(","), told.split(", "), strict=True))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder; none: benchmarks/gpu, or var/gpu with --tiny")
    parser.add_argument("--minutes", type=float, default=11.0, help="for all pieces together")
    parser.add_argument("--only", nargs="*", choices=[piece.name for piece in PIECES], default=[], metavar="PIECE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out = args.out or (ROOT / "var" / "gpu" if args.tiny else RECORDS)
    return args


if __name__ == "__main__":
    main()
