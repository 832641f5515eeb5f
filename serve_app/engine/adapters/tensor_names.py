"""Tensor names of adapter files → the layer they change and the part they are of its change."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from serve_app.engine.adapters.layer_table import LayerTable

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
"""By how the parts begin that no other algorithm has."""
_LONGEST_FIRST = sorted(PARTS, key=len, reverse=True)
_BY_PEFT = re.compile(
    r"(.*)\.(?:(lora_A|lora_B)(?:\.(\w+))?\.weight|lora_magnitude_vector(?:\.(?!weight$)(\w+))?(?:\.weight)?)"
)
_PEFT_PARTS = {"lora_A": "down", "lora_B": "up"}
_OLD_PROCESSOR = re.compile(r"(.*)_lora\.(down|up)\.weight")


class TensorTarget(NamedTuple):
    """Where a tensor belongs."""

    component: str
    layer: str
    """The base model's own name of the layer."""
    part: str
    stem: str
    """The layer as the file spells it."""
    adapter: str
    """The adapter's name within the file, as PEFT writes it; usually empty or `default`."""


def parse(name: str, table: LayerTable, *, unprefixed_text: str = "text_encoder") -> TensorTarget | None:
    """None when the name is of no layer of this base model, or of a part that is not known.

    `unprefixed_text` is the text encoder that names without a prefix are of.
    """
    stem, part, adapter = _split(name)
    if not part:
        return None
    plain = stem.removesuffix("_lora").replace(".processor.", ".").removeprefix("base_model.model.")
    found = table.find(plain, unprefixed_text=unprefixed_text)
    return None if found is None else TensorTarget(*found, part, stem, adapter)


def algorithm_of(names: Iterable[str]) -> str:
    """Name the algorithms of an adapter's tensors, such as `LoRA`, `LoHa with DoRA`, `LoKr and LoRA`."""
    parts: dict[str, set[str]] = {}
    for name in names:
        stem, part, _ = _split(name)
        parts.setdefault(stem, set()).add(part)
    return " and ".join(sorted({_algorithm(each) for each in parts.values()}))


def _algorithm(parts: Iterable[str]) -> str:
    """That of one layer."""
    heads = {part.split("_")[0] for part in parts}
    name = next((algorithm for head, algorithm in ALGORITHMS.items() if head in heads), "LoRA")
    if not heads & {"dora", "peft"}:
        return name
    return "DoRA" if name == "LoRA" else f"{name} with DoRA"


def _split(name: str) -> tuple[str, str, str]:
    """The layer's spelling, the part and the adapter's name; no part when none is known."""
    if written := _BY_PEFT.fullmatch(name):
        return written[1], _PEFT_PARTS.get(written[2], "peft_magnitude"), written[3] or written[4] or ""
    suffix = next((suffix for suffix in _LONGEST_FIRST if name.endswith("." + suffix)), None)
    if suffix is not None:
        return name[: -len(suffix) - 1], PARTS[suffix], ""
    if old := _OLD_PROCESSOR.fullmatch(name):  # diffusers before 0.17: ….processor.to_q_lora.down.weight
        return old[1], old[2], ""
    return name, "", ""
