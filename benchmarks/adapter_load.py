"""Measures a replica's first use of an adapter, and what a stored packed form would save.

    python -m benchmarks.adapter_load [--rank 16] [--rounds 7]

Times are processor time of one thread, so that other load on the machine blurs them little. The models are the pocket
model and SDXL's architecture (layers without weights), each with a random adapter over the layers that trainers change.
"""

import argparse
import hashlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors.torch import load, save_file

from serve_app.engine.adapter_slots import AdapterSlots, LayerWeights, ranks_of
from serve_app.engine.adapters import LayerTable, read_adapter
from serve_app.engine.families.family import Component
from serve_app.engine.families.meta_layers import load_meta_layers
from serve_app.engine.families.unet import KOHYA_PREFIXES
from serve_app.engine.lora_layers import wrap_layers
from serve_app.safetensors_file import check_safetensors
from serve_app.settings import ROOT

T = TypeVar("T")
ENDINGS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
SDXL: Mapping[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def main(rank: int, rounds: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="atelier-load-") as folder:
        for name, table in (("pocket", load_meta_layers(ROOT / "models" / "pocket")), ("SDXL", _sdxl())):
            path = _random_adapter(table, Path(folder) / f"{name}.safetensors", rank)
            print(f"\n{name}, rank {rank}, {path.stat().st_size / 1e6:.1f} MB; median of {rounds}, ms of a processor")
            for what, milliseconds in _measured(table, path, rank, rounds).items():
                print(f"| {what} | {milliseconds:.1f} |")


def _measured(table: LayerTable, path: Path, rank: int, rounds: int) -> Mapping[str, float]:
    slots = AdapterSlots(table.components[table.denoiser].layers, 1)  # pyright: ignore[reportArgumentType]
    times: defaultdict[str, list[float]] = defaultdict(list)

    def timed(what: str, work: Callable[..., T], *args: Any) -> T:
        began = time.thread_time()
        made = work(*args)
        times[what].append(1000 * (time.thread_time() - began))
        return made

    for _ in range(rounds):
        timed("digest, once per process", _digest, path)
        timed("of the next: header and every number checked", check_safetensors, path)
        timed("of the next: bytes read into tensors", lambda: load(path.read_bytes()))
        weights = timed("read: checked, placed, converted", _read, path, table)
        if not slots.layout.covers(ranks_of(weights)):
            slots.change_layout(slots.grow_layout(ranks_of(weights)), 1)
        row = timed("packed for the slots", slots.pack, weights)
        assert row is not None, "the layout was grown for it"
        kept = path.with_suffix(".packed")
        kept.write_bytes(row.flat.numpy().tobytes())
        stored = timed("instead of both: a packed row read", _stored, kept)
        slot = torch.zeros_like(stored)
        timed("copied into a slot", slot.copy_, stored)
    return {what: median(each) for what, each in times.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, table: LayerTable) -> LayerWeights:
    return read_adapter(path, table, max_rank=128, dtype=torch.float32)[table.denoiser]


def _stored(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)


def _random_adapter(table: LayerTable, path: Path, rank: int) -> Path:
    """In float16, as trainers save."""
    generator, tensors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for (component, layer), shape in table.shapes.items():
        if component == table.denoiser and layer.endswith(ENDINGS):
            down, up = (
                torch.randn(rank, *shape[1:], generator=generator),
                torch.randn(shape[0], rank, generator=generator),
            )
            stem = f"lora_unet_{layer.replace('.', '_')}"
            tensors |= {f"{stem}.lora_down.weight": (down / 100).half(), f"{stem}.lora_up.weight": (up / 100).half()}
            tensors[f"{stem}.alpha"] = torch.tensor(float(rank))
    save_file(tensors, path, {"ss_network_module": "networks.lora"})
    return path


def _sdxl() -> LayerTable:
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel(**SDXL)
        layers = wrap_layers(unet)
    return LayerTable({"unet": Component(unet, layers, {}, KOHYA_PREFIXES["unet"])}, "unet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    main(arguments.rank, arguments.rounds)
