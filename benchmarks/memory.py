"""Computes which base models fit which cards, and how many LoRAs beside them, without a card or a weight.

`python -m benchmarks.memory` prints the table of docs/operate/sizing.md. The weights are counted by the function
that refuses a load (`serve_app/engine/families/weights.py`), from headers of true size, and text encoders are placed by
its rule; the LoRAs are counted by the layers of the base model; how much of a card they get is the engine's default.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from serve_app.engine.adapter_store import LINE_BYTES, line_count
from serve_app.engine.device import SPARE_PART
from serve_app.engine.families.registry import load_meta_layers
from serve_app.engine.families.weights import GB, encoder_bytes, encoders_on_host, part_bytes
from serve_app.engine_options import EngineOptions
from tests.engine.hollow_models import write_hollow

MODELS = {
    "sd15": "SD 1.5", "sdxl": "SDXL", "z-image": "Z-Image", "klein": "FLUX.2 klein 4B", "anima": "Anima",
    "flux1": "FLUX.1", "krea2": "Krea 2", "qwen-image-2.1": "Qwen-Image 2.1",
}  # fmt: skip
BLOCKS = ("blocks.", "layers.", "refiner.")
"""Parts of the names of layers in transformer blocks; of a UNet's, behind `.attentions.`."""
CARDS_GIB = (12, 16, 24, 48, 80)
TAKEN = 2**30
"""Bytes of a card that the driver and CUDA's context take (an assumption; what they take differs by card)."""
RANK = 16


def adapter_bytes(folder: Path, rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of an adapter of every linear layer of the denoiser's transformer blocks, as a slot holds it."""
    table = load_meta_layers(folder)
    shapes = [
        shape
        for (component, layer), shape in table.shapes.items()
        if component == table.denoiser
        and len(shape) == 2
        and any(word in layer.split(".attentions.")[-1] for word in BLOCKS)
    ]
    return sum(line_count(rank * side * dtype.itemsize) * LINE_BYTES for shape in shapes for side in shape)


def row(name: str, folder: Path, rank: int, dtype: torch.dtype) -> str:
    parts, adapter = part_bytes(folder, dtype), adapter_bytes(folder, rank, dtype)
    cells = [MODELS[name], _gigabytes(sum(parts.values())), _gigabytes(encoder_bytes(parts))]
    cells += [f"{adapter / 10**6:.0f} MB"]
    for gib in CARDS_GIB:
        free = gib * 2**30 - TAKEN
        on_host = bool(encoders_on_host({name: parts}, free))
        left = free - sum(parts.values()) + on_host * encoder_bytes(parts)
        resident = min(left // SPARE_PART // adapter, EngineOptions().adapter_slots)
        word = "host: " if on_host else ""
        shown = f"{word}{resident}, {_gigabytes(left - resident * adapter)}"
        cells.append(shown if resident > 0 else "does not fit")
    return f"| {' | '.join(cells)} |"


def _gigabytes(size: int) -> str:
    return f"{size / GB:.2f} GB" if size < 10 * GB else f"{size / GB:.1f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    columns = [
        "base model",
        "weights",
        "of them text encoders",
        f"LoRA of rank {options.rank}",
        *(f"{gib} GiB" for gib in CARDS_GIB),
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with tempfile.TemporaryDirectory() as home:
        for name in MODELS:
            folder = write_hollow(Path(home) / name, name)
            print(row(name, folder, options.rank, getattr(torch, options.dtype)))


if __name__ == "__main__":
    main()
