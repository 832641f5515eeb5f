"""Keeps what pieces found as `benchmarks/gpu/<card>.json`, and makes the tables of RESULTS.md of these files.

python -m benchmarks.gpu_tables          # writes them between the two marks of RESULTS.md
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_models import ROOT

RECORDS = ROOT / "benchmarks" / "gpu"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
BEGIN, END = "<!-- made by `python -m benchmarks.gpu_tables` -->\n", "<!-- until here -->\n"

Pieces = dict[str, dict[str, Any]]


def read(file: Path) -> Pieces:
    return json.loads(file.read_text()) if file.exists() else {}


def keep(file: Path, name: str, one: Mapping[str, Any]) -> None:
    """Write what a piece found, whole or not at all, and a copy where the variable OUT names a folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(read(file) | {name: one}, indent=1, default=str) + "\n")
    draft.replace(file)
    if os.environ.get("OUT"):
        shutil.copy(file, os.environ["OUT"])


KEPT = "kept of no LoRAs"
ROWS: Sequence[tuple[str, str, str, str]] = (
    ("SDXL: same bytes alone, in company and on another engine", "all", "bytes-sdxl", "same bytes"),
    ("SD 1.5: the same", "all", "bytes-sd15", "same bytes"),
    ("Z-Image: the same", "all", "bytes-z-image", "same bytes"),
    ("klein: the same", "all", "bytes-klein", "same bytes"),
    ("SDXL: the first images again, in another process", "all", "restart-sdxl", "same bytes"),
    ("SDXL 1024², 20 steps: images a second with 16 LoRAs", "1.65", "speed-sdxl", "16 LoRAs: images/s"),
    ("of that without LoRAs", "0.92", "speed-sdxl", KEPT),
    ("with one LoRA, without", "", "speed-sdxl", "1 LoRA: images/s + no LoRAs: images/s"),
    ("share of the matrix roof", "0.44", "speed-sdxl", "roof: share"),
    ("a step of 16 rows, and its gaps, ms", "", "speed-sdxl", "step ms + steady: ms of gaps"),
    ("a lone image, s", "", "speed-sdxl", "a lone image s"),
    ("a step in passes of 4 and 16 rows, ms", "", "shapes-sdxl", "ms in passes of 4 + ms in passes of 16"),
    ("with guidance over the first half", "2.1", "guidance-sdxl", "half: images/s"),
    ("in FP8", "1.75", "fp8-sdxl", "16 LoRAs: images/s"),
    ("Z-Image 1024², 8 steps: images a second with 16 LoRAs", "", "speed-z-image", "16 LoRAs: images/s"),
    ("of that without LoRAs", "0.9", "speed-z-image", KEPT),
    ("klein 1024², 4 steps: images a second with 16 LoRAs", "", "speed-klein", "16 LoRAs: images/s"),
    ("of that without LoRAs", "0.9", "speed-klein", KEPT),
    ("SD 1.5 512², 20 steps: images a second with 32 LoRAs", "10.5", "speed-sd15", "32 LoRAs: images/s"),
    ("of that without LoRAs", "0.92", "speed-sd15", KEPT),
    ("SDXL: times diffusers' compiled model with one LoRA", "2", "compiled-sdxl", "times"),
    ("SDXL: times batches of one LoRA", "1.6", "one-per-batch-sdxl", "times"),
    ("SDXL: times diffusers with all LoRAs loaded", "2", "preloaded-sdxl", "times"),
    ("SDXL: times diffusers that loads each job's", "2", "load-per-job-sdxl", "times"),
    ("SDXL: LoRAs of rank 32 in slots", "400", "slots-sdxl", "slots"),
    ("from host memory to a slot, ms", "5", "slots-sdxl", "to slot ms"),
    ("SD 1.5: 64 jobs for 64 LoRAs, images a second", "", "many-loras-sd15", "images/s"),
    ("SDXL: latents off float32, bfloat16, with a LoRA", "", "parity-sdxl", "bfloat16, a LoRA: off float32"),
)
"""What is asked; the goal; the piece, and the keys of its result with colons between them, of several with a plus."""


def tables(records: Mapping[str, Pieces]) -> str:
    """Return the tables of every card's record by its name."""
    cards = list(records) or ["no card yet"]
    lines = [f"| `make gpu` | goal | {' | '.join(cards)} |", f"|---|---|{'---|' * len(cards)}"]
    lines += [
        f"| {what} | {goal} | {' | '.join(_cell(records.get(card, {}).get(piece), keys) for card in cards)} |"
        for what, goal, piece, keys in ROWS
    ]
    for card in records:
        shapes = records[card].get("attention", {}).get("found", {}).get("shapes", {})
        if shapes:
            lines += [
                "",
                f"Attention on {card}: ms, and the row counts at which rows have the bits that they have in 16.",
            ]
            lines += ["", f"| | {' | '.join(next(iter(shapes.values())))} |", "|---|" + "---|" * len(BACK_ENDS)]
            lines += [f"| {shape} | {' | '.join(map(_attended, found.values()))} |" for shape, found in shapes.items()]
    return "\n".join(lines) + "\n"


BACK_ENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def _attended(one: Mapping[str, Any]) -> str:
    return f"{one['ms']}; {', '.join(map(str, one['same bits at rows'])) or 'none'}" if "ms" in one else "refused"


def _cell(one: Mapping[str, Any] | None, keys: str) -> str:
    if one is None:
        return "not measured"
    if "skipped" in one:
        return f"not measured: {one['skipped']}"
    values: list[str] = []
    for path in keys.split(" + "):
        value: Any = one.get("found", {})
        for key in path.split(": "):
            value = value.get(key) if isinstance(value, dict) else None
        values.append("failed" if value is None else str(value))
    return ", ".join(values)


def with_tables(results: str, records: Mapping[str, Pieces]) -> str:
    """Return the text of RESULTS.md with the tables between its marks."""
    before, rest = results.split(BEGIN)
    return before + BEGIN + tables(records) + END + rest.partition(END)[2]


def main() -> None:
    records = {file.stem: read(file) for file in sorted(RECORDS.glob("*.json"))}
    RESULTS.write_text(with_tables(RESULTS.read_text(), records))


if __name__ == "__main__":
    main()
