"""Reads a LoRA safetensors file into layer weights, by the names kohya, diffusers and PEFT give their keys.

Every key is placed or the file is refused with the keys' names: a weight is never dropped in silence.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from serve_app.engine.layers import SlotLayer
from serve_app.engine.lora import ModuleWeights


class UnusableAdapter(ValueError):
    """The file is not an adapter this base model can wear; the message says why, with the keys that offended."""


AdapterWeights = dict[str, dict[str, ModuleWeights]]
"""component (`unet`, `text_encoder`, `text_encoder_2`) → layer → weights."""

KOHYA_PREFIXES = {
    "lora_unet": "unet",
    "lora_te": "text_encoder",
    "lora_te1": "text_encoder",
    "lora_te2": "text_encoder_2",
}
PARTS = {
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_A.default.weight": "down",
    "lora_B.default.weight": "up",
    "lora.down.weight": "down",
    "lora.up.weight": "up",
    "lora_linear_layer.down.weight": "down",
    "lora_linear_layer.up.weight": "up",
    "down.weight": "down",
    "up.weight": "up",
    "alpha": "alpha",
    "lora_alpha": "alpha",
    "dora_scale": "magnitude",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_magnitude_vector.default.weight": "magnitude",
}
FOREIGN = {
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "LoCon with a mid tensor",
    "oft_": "OFT",
    "diff": "full-weight difference",
}
_LONGEST_FIRST = sorted(PARTS, key=len, reverse=True)


class LayerTable:
    """A base model's layers by every name files use for them."""

    def __init__(self, layers: Mapping[str, Mapping[str, SlotLayer]], aliases: Mapping[str, str]) -> None:
        self.shapes: dict[tuple[str, str], torch.Size] = {}
        self._names: dict[tuple[str, str], str] = {}
        for component, its_layers in layers.items():
            for name, layer in its_layers.items():
                self.shapes[component, name] = layer.weight.shape
                for spelling in _spellings(component, name):
                    self._names[component, spelling] = name
        for alias, layer in aliases.items():
            if ("unet", layer) in self.shapes:
                self._names["unet", alias] = layer

    def find(self, component: str, name: str) -> str | None:
        return self._names.get((component, name))


class _Key(NamedTuple):
    component: str
    layer: str
    part: str


def read_adapter(path: Path, table: LayerTable, *, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """The adapter in `path`, ready to pack. Raises UnusableAdapter with the reason, OSError when the file cannot be read."""
    tensors, metadata = _read_tensors(path)
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    strangers: list[str] = []
    for name, tensor in tensors.items():
        key = _parse(name, table)
        if key is None:
            strangers.append(name)
        else:
            found.setdefault((key.component, key.layer), {})[key.part] = tensor
    if strangers:
        raise UnusableAdapter(_explain(strangers))
    alphas = _metadata_alphas(metadata, table)
    weights: AdapterWeights = {}
    for (component, layer), parts in found.items():
        made = _module_weights(
            f"{component}.{layer}", parts, table.shapes[component, layer], alphas(component, layer), max_rank
        )
        weights.setdefault(component, {})[layer] = made._replace(down=made.down.to(dtype), up=made.up.to(dtype))
    if not weights:
        raise UnusableAdapter("the file holds no LoRA weights")
    return weights


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read whole by Python, which lets other threads run meanwhile; `safe_open` would hold them all up on a slow disk."""
    content = path.read_bytes()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise UnusableAdapter(f"not a safetensors file: {error}") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return tensors, header.get("__metadata__", {})


def _parse(key: str, table: LayerTable) -> _Key | None:
    suffix = next((suffix for suffix in _LONGEST_FIRST if key.endswith("." + suffix)), None)
    if suffix is not None:
        stem = key[: -len(suffix) - 1]
    elif match := re.fullmatch(
        r"(.*)_lora\.(down|up)\.weight", key
    ):  # diffusers before 0.17: ….processor.to_q_lora.down.weight
        stem, suffix = match[1], f"{match[2]}.weight"
    else:
        return None
    stem = stem.removesuffix("_lora").replace(".processor.", ".").removeprefix("base_model.model.")
    component, name = _component(stem)
    layer = table.find(component, name)
    return None if layer is None else _Key(component, layer, PARTS[suffix])


def _component(stem: str) -> tuple[str, str]:
    """`lora_te1_text_model_…` or `text_encoder.text_model.…` → component and the name within it; bare names are the UNet's."""
    for prefix, component in KOHYA_PREFIXES.items():
        if stem.startswith(prefix + "_"):
            return component, stem[len(prefix) + 1 :]
    head, _, rest = stem.partition(".")
    if head in ("unet", "text_encoder", "text_encoder_2"):
        return head, rest
    return "unet", stem


def _spellings(component: str, layer: str) -> set[str]:
    names = {layer, layer.removesuffix(".0") if layer.endswith("to_out.0") else layer}
    if component != "unet":
        bare = layer.removeprefix("text_model.")
        names |= {bare, "text_model." + bare}
        names |= {name.replace(f".{p}_proj", f".to_{p}") for name in set(names) for p in "qkv"} | {
            name.replace(".out_proj", ".to_out") for name in set(names)
        }
    return names | {name.replace(".", "_") for name in names}


def _module_weights(
    name: str, parts: Mapping[str, Tensor], shape: torch.Size, alpha: float | None, max_rank: int
) -> ModuleWeights:
    if "down" not in parts or "up" not in parts:
        raise UnusableAdapter(f"{name}: has {' and '.join(sorted(parts))} but needs both down and up")
    down, up = parts["down"].float(), parts["up"].float()
    rank = down.shape[0]
    if rank > max_rank:
        raise UnusableAdapter(f"{name}: rank {rank} is above this server's limit of {max_rank}")
    if down[0].numel() == shape[1:].numel():
        down = down.view(rank, *shape[1:])  # a linear may be written as a 1×1 convolution, and the other way round
    if up.flatten(1).shape != (shape[0], rank) or down.shape[1:] != shape[1:]:
        raise UnusableAdapter(
            f"{name}: down {tuple(down.shape)} and up {tuple(up.shape)} do not fit a layer of {tuple(shape)}"
        )
    if "alpha" in parts:
        alpha = float(parts["alpha"])
    magnitude = parts.get("magnitude")
    if magnitude is not None:
        magnitude = _magnitude(name, magnitude, shape[0])
    made = ModuleWeights(down, up.flatten(1), (rank if alpha is None else alpha) / rank, magnitude)
    _require_finite(name, made)
    return made


def _magnitude(name: str, magnitude: Tensor, fan_out: int) -> Tensor:
    """DoRA's m as [out]; LyCORIS can also keep one per input, which is another formula."""
    if (
        magnitude.numel() != fan_out
        or magnitude.shape[0] not in (1, fan_out)
        or (magnitude.shape[0] == 1 and fan_out != 1 and magnitude.dim() == 2)
    ):
        raise UnusableAdapter(
            f"{name}: a DoRA scale of {tuple(magnitude.shape)} is not one number per output ({fan_out})"
        )
    return magnitude.float().flatten()


def _require_finite(name: str, made: ModuleWeights) -> None:
    numbers = [made.down, made.up, torch.tensor(made.scale), *([] if made.magnitude is None else [made.magnitude])]
    if not all(bool(tensor.isfinite().all()) for tensor in numbers):
        raise UnusableAdapter(f"{name}: holds numbers that are not finite")


def _metadata_alphas(metadata: Mapping[str, str], table: LayerTable) -> Any:
    """alpha by layer from diffusers' `lora_adapter_metadata`: `lora_alpha`, and `alpha_pattern` for layers of their own."""
    try:
        config: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    except json.JSONDecodeError as error:
        raise UnusableAdapter(f"lora_adapter_metadata is not JSON: {error}") from error

    for name, value in config.items():
        if name.split(".")[-1] == "use_rslora" and value:
            raise UnusableAdapter("use_rslora: rank-stabilised scaling is not supported")

    def alpha(component: str, layer: str) -> float | None:
        pattern: dict[str, float] = config.get(f"{component}.alpha_pattern") or {}
        for name, value in pattern.items():
            if re.match(rf"(.*\.)?({name})$", layer):  # PEFT's own rule
                return float(value)
        value = config.get(f"{component}.lora_alpha")
        return None if value is None else float(value)

    return alpha


def _explain(strangers: list[str]) -> str:
    kinds = {kind for mark, kind in FOREIGN.items() if any(mark in name for name in strangers)}
    shown = ", ".join(sorted(strangers)[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
    reason = (
        f"{' and '.join(sorted(kinds))} weights are not supported" if kinds else "the base model has no such layers"
    )
    return f"{reason}: {shown}"
