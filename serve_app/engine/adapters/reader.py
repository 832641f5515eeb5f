"""Reads the numbers of an adapter into layer weights, once the place of each tensor is known."""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import ModuleWeights
from serve_app.engine.adapters.convert import check_parts, is_same_change, module_weights, require_size
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.placing import Placed, place
from serve_app.engine.adapters.scaling import Scaling
from serve_app.engine.adapters.source import Source, open_source
from serve_app.safetensors_file import UnusableFile, is_unused, read_numbers

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

AdapterWeights = dict[str, dict[str, ModuleWeights]]
"""component (such as `unet`, `text_encoder`) → layer → weights."""


def read_adapter(path: Path, table: LayerTable, *, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Return the adapter in `path` (a file, or a folder of PEFT or diffusers), ready to pack.

    Raises UnusableAdapter with the reason, OSError when it cannot be read.
    """
    return read_placed(place(open_source(path), table), table, max_rank=max_rank, dtype=dtype)


def read_placed(placed: Placed, table: LayerTable, *, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Return the adapter whose tensors have been placed. Raises UnusableAdapter with the reason."""
    tensors = placed.source.header.tensors
    scalings: list[Scaling] = []
    for component, name, spelled, names in placed.layers:
        parts = {part: _outline(tensors[tensor]) for part, tensor in names.items()}
        is_fused = len(table.layers_of(component, name)) > 1
        limit = math.inf if is_fused else max_rank
        check_parts(f"{component}.{name}", parts, torch.Size(table.shapes[component, name]), max_rank=limit)
        scalings.append(placed.rules.of(component, spelled))
        rank = parts["down"].shape[0] if "down" in parts else None
        scalings[-1].require_agreement(f"{component}.{name}", parts, rank)
    weights: AdapterWeights = {}
    with _opened(placed.source) as read:
        for (component, name, spelled, names), scaling in zip(placed.layers, scalings, strict=True):
            layers = table.layers_of(component, name)
            made = module_weights(
                f"{component}.{name}",
                {part: read(tensor) for part, tensor in names.items() if not is_unused(tensor, tensors)},
                [table.base_weight(component, layer) for layer in layers],
                alpha=scaling.alpha,
                rank_stabilized=scaling.rank_stabilized,
            )
            for layer, each in zip(layers, made, strict=True):
                require_size(f"{component}.{layer}", each, max_rank)
                packed = each.to(dtype)
                other = weights.setdefault(component, {}).setdefault(layer, packed)
                if other is not packed and not is_same_change(other, packed):
                    raise UnusableAdapter(f"two different changes of {component}.{layer}, one of them as {spelled}")
    return weights


def _outline(tensor: Mapping[str, Any]) -> Tensor:
    """Return a tensor of torch's meta device, which has a shape and no numbers."""
    return torch.empty(tensor["shape"], dtype=_DTYPES[tensor["dtype"]], device="meta")


@contextmanager
def _opened(source: Source) -> Generator[Callable[[str], Tensor]]:
    """Return a function that reads one tensor; it raises UnusableAdapter for numbers that are not finite.

    Python reads the file, which lets other threads run meanwhile; `safe_open` would hold them all up on a slow disk.
    """
    with source.file.open("rb") as file:

        def read(name: str) -> Tensor:
            tensor = source.header.tensors[name]
            try:
                numbers = read_numbers(file, source.header, name)
            except UnusableFile as error:
                raise UnusableAdapter(str(error)) from error
            return torch.frombuffer(numbers, dtype=_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])

        yield read
