"""Reads an adapter into layer weights, by the layer and the part that each tensor's name tells.

Every key is placed or the file is refused: a weight is never dropped in silence.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import ModuleWeights
from serve_app.engine.adapters.convert import check_parts, is_same_change, module_weights, require_size
from serve_app.engine.adapters.explain import explain, wrong_family
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.scaling import Scaling, scaling_rules
from serve_app.engine.adapters.source import Source, open_source
from serve_app.safetensors_file import is_unused

PARTS: Mapping[str, str] = {
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora_mid.weight": "mid",
    "lora.down.weight": "down",
    "lora.up.weight": "up",
    "lora_linear_layer.down.weight": "down",
    "lora_linear_layer.up.weight": "up",
    "down.weight": "down",
    "up.weight": "up",
    "alpha": "alpha",
    "lora_alpha": "alpha",
    "scalar": "scalar",
    "dora_scale": "dora_scale",
    **{f"hada_{part}": f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f"lokr_{part}": f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    "weight": "ia3_weight",
    "on_input": "ia3_on_input",
}
ALGORITHMS: Mapping[str, str] = {"hada": "LoHa", "lokr": "LoKr", "ia3": "IA3"}
"""An algorithm is known by parts whose names begin so, which no other algorithm has."""
_LONGEST_FIRST = sorted(PARTS, key=len, reverse=True)
_MAGNITUDE = r"(?:(?:lora_|dora_)?magnitude(?:_vector)?|weight_m_wdecomp)"
"""PEFT's DoRA keeps `lora_magnitude_vector`, ai-toolkit's `magnitude`, the method's authors `weight_m_wdecomp`."""
_BY_PEFT = re.compile(
    rf"(.*)\.(?:(lora_A|lora_B)(?:\.(\w+))?\.weight|{_MAGNITUDE}(?:\.(?!weight$)(\w+))?(?:\.weight)?)"
)
_PEFT_PARTS = {"lora_A": "down", "lora_B": "up"}
_OLD_PROCESSOR = re.compile(r"(.*)_lora\.(down|up)\.weight")
_TRAINING_ONLY = re.compile(r"\.lora_(velora_embed|monteclora_sampler)\b")
"""PEFT's VeLoRA and MonteCLoRA read these in training; an image is drawn with the plain LoRA beside them."""
_BESIDE = {"alpha", "scalar", "dora_scale", "peft_magnitude"}
"""Parts that say something of a layer's factors, and nothing without them."""


class TensorTarget(NamedTuple):
    """The layer and the part to which a tensor belongs."""

    component: str
    name: str
    """The base model's own name of the layer, or the fused name of several."""
    part: str
    stem: str
    """The layer as the file spells it."""
    adapter: str
    """The adapter's name within the file, as PEFT writes it; usually empty or `default`."""


def parse(name: str, table: LayerTable, *, unprefixed_text: str = "text_encoder") -> TensorTarget | None:
    """Parse a tensor's name; return None when no layer of this base model or no known part is named so.

    `unprefixed_text` is the text encoder that names without a prefix are of.
    """
    stem, part, adapter = _split(name)
    if not part:
        return None
    found = table.find(stem, unprefixed_text=unprefixed_text)
    return None if found is None else TensorTarget(*found, part, stem, adapter)


def algorithm_of(source: Source, table: LayerTable) -> str:
    """Name the algorithms of an adapter's tensors, such as `LoRA`, `LoHa with DoRA`, `LoKr and LoRA`."""
    parts = [each.tensors for each in _place(source, source.outlines(), table)]
    return " and ".join(sorted({_algorithm(each) for each in parts}))


def _algorithm(parts: Iterable[str]) -> str:
    """Return the algorithm of one layer's parts."""
    heads = {part.split("_")[0] for part in parts}
    name = next((algorithm for head, algorithm in ALGORITHMS.items() if head in heads), "LoRA")
    if not heads & {"dora", "peft"}:
        return name
    return "DoRA" if name == "LoRA" else f"{name} with DoRA"


def _split(name: str) -> tuple[str, str, str]:
    """Return the layer's spelling, the part and the adapter's name; no part when none is known."""
    if written := _BY_PEFT.fullmatch(name):
        return written[1], _PEFT_PARTS.get(written[2], "peft_magnitude"), written[3] or written[4] or ""
    suffix = next((suffix for suffix in _LONGEST_FIRST if name.endswith("." + suffix)), None)
    if suffix is not None:
        return name[: -len(suffix) - 1], PARTS[suffix], ""
    if old := _OLD_PROCESSOR.fullmatch(name):  # diffusers before 0.17: ….processor.to_q_lora.down.weight
        return old[1], old[2], ""
    return name, "", ""


AdapterWeights = dict[str, dict[str, ModuleWeights]]
"""component (such as `unet`, `text_encoder`) → layer → weights."""


def read_adapter(
    path: Path, table: LayerTable, *, max_rank: int, dtype: torch.dtype, pattern_seconds: float = math.inf
) -> AdapterWeights:
    """Return the adapter in `path` (a file, or a folder of PEFT or diffusers), ready to pack.

    Raises UnusableAdapter with the reason, OSError when it cannot be read.
    """
    return read_source(open_source(path), table, max_rank=max_rank, dtype=dtype, pattern_seconds=pattern_seconds)


def read_source(
    source: Source, table: LayerTable, *, max_rank: int, dtype: torch.dtype, pattern_seconds: float = math.inf
) -> AdapterWeights:
    """Return the adapter that was opened; `pattern_seconds` is what PEFT's `alpha_pattern` may take.

    A replica sets no limit: it reads what was found quick when it was registered. Raises UnusableAdapter with the
    reason.
    """
    rules = scaling_rules(source.metadata, source.peft_config, seconds=pattern_seconds)
    outlines = source.outlines()
    found = _place(source, outlines, table)
    rules.require_components(table.components)
    scalings: list[Scaling] = []
    for component, name, spelled, names in found:
        parts = {part: outlines[tensor] for part, tensor in names.items()}
        is_fused = len(table.layers_of(component, name)) > 1
        limit = math.inf if is_fused else max_rank
        check_parts(f"{component}.{name}", parts, table.shapes[component, name], max_rank=limit)
        scalings.append(rules.of(component, spelled))
        rank = parts["down"].shape[0] if "down" in parts else None
        scalings[-1].require_agreement(f"{component}.{name}", parts, rank)
    weights: AdapterWeights = {}
    with source.opened() as read:
        for (component, name, spelled, names), scaling in zip(found, scalings, strict=True):
            layers = table.layers_of(component, name)
            made = module_weights(
                f"{component}.{name}",
                {part: read(tensor) for part, tensor in names.items() if not is_unused(tensor, outlines)},
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


class Found(NamedTuple):
    """A layer, or several under a fused name, and the tensors for it."""

    component: str
    name: str
    spelled: str
    """What its writer calls it within the component."""
    tensors: dict[str, str]
    """Part → the tensor's name."""


def _place(source: Source, outlines: Mapping[str, Tensor], table: LayerTable) -> list[Found]:
    """Return where every tensor belongs. Names, and shapes against the base's family, are looked at."""
    found: dict[tuple[str, str], Found] = {}
    adapters: dict[tuple[str, str], str] = {}
    unplaced: list[str] = []
    unprefixed_text = _unprefixed_text(outlines, table)
    for tensor in outlines:
        if _TRAINING_ONLY.search(tensor):
            continue
        key = parse(tensor, table, unprefixed_text=unprefixed_text)
        if key is None:
            unplaced.append(tensor)
            continue
        if tensor.startswith("base_model.model.") and source.peft_config is None:
            raise UnusableAdapter(
                "a PEFT adapter without its adapter_config.json, which says how strongly it acts: "
                "bring the whole folder"
            )
        if key.adapter and (other := adapters.setdefault((key.component, key.name), key.adapter)) != key.adapter:
            raise UnusableAdapter(f"two adapters in one file: {other} and {key.adapter}")
        spelled = key.stem.removeprefix("base_model.model.").removeprefix(f"{key.component}.")
        place = found.setdefault((key.component, key.stem), Found(key.component, key.name, spelled, {}))
        other = place.tensors.setdefault(key.part, tensor)
        if other != tensor:
            raise UnusableAdapter(f"two tensors of one part: {other} and {tensor}: only one of them can be meant")
    unplaced += _weights_of_no_algorithm(found.values())
    if unplaced or not found:
        raise UnusableAdapter(explain(unplaced or [*outlines], outlines, table))
    if reason := wrong_family(outlines, table, source.declared):
        raise UnusableAdapter(reason)
    return _whole_layers(found.values())


def _whole_layers(found: Iterable[Found]) -> list[Found]:
    """Join a layer's magnitude, alpha or scalar with its factors where these are under another spelling of its name.

    diffusers' advanced trainers write `lora_unet_…_attn1.to_k.lora_magnitude_vector` beside
    `lora_unet_…_attn1_to_k.lora_down.weight`.
    """
    layers = [each for each in found if each.tensors.keys() - _BESIDE]
    by_name: dict[tuple[str, str], list[Found]] = {}
    for each in layers:
        by_name.setdefault((each.component, each.name), []).append(each)
    for beside in (each for each in found if not each.tensors.keys() - _BESIDE):
        homes = by_name.get((beside.component, beside.name), [])
        if len(homes) != 1 or homes[0].tensors.keys() & beside.tensors.keys():
            raise UnusableAdapter(
                f"{beside.component}.{beside.name}: has {' and '.join(sorted(beside.tensors))} as {beside.spelled}, "
                "but no one pair of weights that it belongs to: save both under the same name"
            )
        homes[0].tensors.update(beside.tensors)
    return layers


def _weights_of_no_algorithm(found: Iterable[Found]) -> list[str]:
    """Return the `….weight` keys that are a whole checkpoint's layers: IA³'s have `….on_input` beside them."""
    return [
        each.tensors["ia3_weight"]
        for each in found
        if "ia3_weight" in each.tensors and "ia3_on_input" not in each.tensors
    ]


def _unprefixed_text(outlines: Mapping[str, Tensor], table: LayerTable) -> str:
    """Return the text encoder whose shapes fit most of the names without a prefix; the first of equals."""
    encoders = [name for name in table.components if name != table.denoiser]
    loose = [name for name in outlines if parse(name, table, unprefixed_text="") is None]
    if len(encoders) < 2 or not loose:
        return "text_encoder"
    return max(encoders, key=lambda encoder: sum(_fits(name, outlines[name], table, encoder) for name in loose))


def _fits(name: str, outline: Tensor, table: LayerTable, encoder: str) -> bool:
    """Return whether a tensor's shape fits its layer in this encoder."""
    key = parse(name, table, unprefixed_text=encoder)
    if key is None:
        return False
    shape = table.shapes[key.component, key.name]
    if key.part == "down":
        return outline.shape[1:].numel() == shape[1:].numel()
    return outline.dim() > 0 and outline.shape[0] == shape[0]
