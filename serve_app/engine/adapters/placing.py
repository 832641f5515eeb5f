"""Finds the layer and the part of each of an adapter's tensors, by its name. Nothing here loads torch.

Every key is placed or the file is refused: a weight is never dropped in silence.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from serve_app.engine.adapters.explain import Shape, explain, wrong_family
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.scaling import ScalingRules, scaling_rules
from serve_app.engine.adapters.source import Source

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
    "diff": "diff",
}
ALGORITHMS: Mapping[str, str] = {"hada": "LoHa", "lokr": "LoKr", "ia3": "IA3", "diff": "difference"}
"""An algorithm is known by parts whose names begin with its key here, which no other algorithm has."""
_LONGEST_FIRST = sorted(PARTS, key=len, reverse=True)
_MAGNITUDE = r"(?:(?:lora_|dora_)?magnitude(?:_vector)?|weight_m_wdecomp)"
"""PEFT's DoRA keeps `lora_magnitude_vector`, ai-toolkit's `magnitude`, the method's authors `weight_m_wdecomp`."""
_BY_PEFT = re.compile(
    rf"(.*)\.(?:(lora_A|lora_B)(?:\.(\w+))?\.weight|{_MAGNITUDE}(?:\.(?!weight$)(\w+))?(?:\.weight)?)"
)
_PEFT_PARTS = {"lora_A": "down", "lora_B": "up"}
_OLD_PROCESSOR = re.compile(r"(.*)_lora\.(down|up)\.weight")
_TRAINING_ONLY = re.compile(r"\.lora_(velora_embed|monteclora_sampler)\b")
"""PEFT's VeLoRA and MonteCLoRA read these in training; an image is drawn with the plain LoRA alone."""
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


class Found(NamedTuple):
    """A layer, or several under a fused name, and the tensors for it."""

    component: str
    name: str
    spelled: str
    """What its writer calls it within the component."""
    tensors: dict[str, str]
    """Part → the tensor's name."""


class Placed(NamedTuple):
    """An adapter's file whose tensors all have a place."""

    source: Source
    layers: Sequence[Found]
    rules: ScalingRules

    @property
    def algorithm(self) -> str:
        """Name the algorithms of the tensors, such as `LoRA`, `LoHa with DoRA`, `LoKr and LoRA`."""
        return " and ".join(sorted({_algorithm(each.tensors) for each in self.layers}))


def place(source: Source, table: LayerTable, *, pattern_seconds: float = math.inf) -> Placed:
    """Place every tensor of an adapter; `pattern_seconds` is what PEFT's `alpha_pattern` may take.

    A replica sets no limit: it reads what was found quick when it was registered. Raises UnusableAdapter for all that
    the header and PEFT's configuration tell, but for the shapes of a layer's own parts.
    """
    rules = scaling_rules(source.metadata, source.peft_config, seconds=pattern_seconds)
    layers = _found(source, table)
    rules.require_components(table.components)
    return Placed(source, layers, rules)


def _algorithm(parts: Iterable[str]) -> str:
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


def _found(source: Source, table: LayerTable) -> list[Found]:
    """Return where every tensor belongs. Names, and shapes against the base's family, are looked at."""
    shapes = source.shapes
    found: dict[tuple[str, str], Found] = {}
    adapters: dict[tuple[str, str], str] = {}
    unplaced: list[str] = []
    unprefixed_text = _unprefixed_text(shapes, table)
    for tensor in shapes:
        if _TRAINING_ONLY.search(tensor):
            continue
        key = parse(tensor, table, unprefixed_text=unprefixed_text)
        if key is None:
            unplaced.append(tensor)
            continue
        written = key.stem.removeprefix("base_model.model.")
        is_original = key.component == table.denoiser and written not in table.components[table.denoiser].layers
        if written != key.stem and source.peft_config is None and not is_original:  # fal's trainer has no alpha
            raise UnusableAdapter(
                "a PEFT adapter without its adapter_config.json, which says how strongly it acts: send the whole folder"
            )
        if key.adapter and (other := adapters.setdefault((key.component, key.name), key.adapter)) != key.adapter:
            raise UnusableAdapter(f"two adapters in one file: {other} and {key.adapter}")
        spelled = written.removeprefix(f"{key.component}.")
        place = found.setdefault((key.component, key.stem), Found(key.component, key.name, spelled, {}))
        other = place.tensors.setdefault(key.part, tensor)
        if other != tensor:
            raise UnusableAdapter(f"two tensors of one part: {other} and {tensor}: only one of them can be meant")
    unplaced += _weights_of_no_algorithm(found.values())
    if unplaced or not found:
        raise UnusableAdapter(explain(unplaced or [*shapes], shapes, table))
    if reason := wrong_family(shapes, table, source.declared):
        raise UnusableAdapter(reason)
    return _whole_layers(found.values())


def _whole_layers(found: Iterable[Found]) -> list[Found]:
    """Join a layer's magnitude, alpha or scalar with its factors where these are under another spelling of its name.

    diffusers' advanced trainers write `lora_unet_…_attn1.to_k.lora_magnitude_vector` next to
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
                "but not exactly one pair of weights to which it belongs: save both under the same name"
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


def _unprefixed_text(shapes: Mapping[str, Shape], table: LayerTable) -> str:
    """Return the text encoder whose shapes fit most of the names without a prefix; the first of equals."""
    encoders = [name for name in table.components if name != table.denoiser]
    loose = [name for name in shapes if parse(name, table, unprefixed_text="") is None]
    if len(encoders) < 2 or not loose:
        return "text_encoder"
    return max(encoders, key=lambda encoder: sum(_fits(name, shapes[name], table, encoder) for name in loose))


def _fits(name: str, given: Shape, table: LayerTable, encoder: str) -> bool:
    """Return whether a tensor's shape fits its layer in this encoder."""
    key = parse(name, table, unprefixed_text=encoder)
    if key is None:
        return False
    shape = table.shapes[key.component, key.name]
    if key.part == "down":
        return math.prod(given[1:]) == math.prod(shape[1:])
    return given[:1] == shape[:1]
