"""Scales each layer's change by PEFT's configuration: `lora_alpha`, `alpha_pattern`, `use_rslora`.

It stands in `adapter_config.json`, in diffusers' metadata, or as plain metadata such as `lora_alpha`. A file that
contradicts it is refused. PEFT's own classes are not used, whose import takes seconds; a test compares with them.
"""

import json
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from serve_app.engine.adapters.layer_table import UnusableAdapter

METADATA = "lora_adapter_metadata"
"""diffusers keeps the configuration of each component under this name: `{"unet.lora_alpha": 8, …}`, or of its only one
without a prefix (`save_lora_adapter`)."""
PLAIN_METADATA: Mapping[str, str] = {
    "lora_alpha": "lora_alpha",
    "network_alpha": "lora_alpha",
    "alpha": "lora_alpha",
    "r": "r",
    "rank": "r",
    "use_rslora": "use_rslora",
}
"""Fields by the names that trainers write next to the tensors, as text, with or without `transformer.` before them."""
DENOISERS = ("unet", "transformer")
"""Trainers write either name, whichever denoiser they train."""
PEFT_ALPHA = 8
"""PEFT's own alpha, which holds where a configuration names none."""
MAX_ALPHA = 1e9
DYNAMIC = math.inf
"""An alpha or rank that sd-scripts' resizing and merging call "Dynamic": each layer has its own."""
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]+")
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""These initializations train on another base weight, without which the trained difference cannot be applied."""
UNSUPPORTED = ("lora_bias", "modules_to_save", "target_parameters", "layer_replication", "use_qalora", "use_bdlora",
               "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config")  # fmt: skip


class Scaling(NamedTuple):
    """A layer's alpha, divided by its rank, or by the root of it (Kalajdzievski 2023)."""

    alpha: float | None
    rank_stabilized: bool
    rank: float | None = None
    """The rank that the layer must have; None where nothing tells it."""
    dora: bool | None = None
    """Whether the layer must have DoRA's magnitudes; None where nothing tells it."""

    def require_agreement(self, name: str, parts: Collection[str], rank: int | None) -> None:
        """Raises UnusableAdapter when the layer `name` with these parts is not what the configuration says.

        `rank` is that of a LoRA, None for other algorithms.
        """
        if "alpha" not in parts and self.alpha == DYNAMIC:
            raise UnusableAdapter(
                f'{name}: has no alpha, though the metadata call it "Dynamic", each layer\'s own: save the file with '
                "its alpha tensors"
            )
        if rank is None:
            return
        if "alpha" not in parts and self.rank not in (None, rank):
            raise UnusableAdapter(f"{name}: its rank is {rank}, but its configuration says {self.rank:g}")
        if self.dora not in (None, "peft_magnitude" in parts or "dora_scale" in parts):
            has = "no magnitudes" if self.dora else "magnitudes of DoRA"
            raise UnusableAdapter(f"{name}: has {has}, but its configuration says use_dora: {self.dora}")


UNTOLD = Scaling(None, False)


class Pattern(NamedTuple):
    """A key of `alpha_pattern`: it fits the whole of a layer's name, or its end after a dot."""

    regex: re.Pattern[str]
    length: int
    """The length of a plain name, whose dots stand for any character and which is compared in one pass; 0 for other
    expressions."""

    def fits(self, layer: str) -> bool:
        if not self.length:
            return self.regex.match(layer) is not None
        before, end = layer[: -self.length], layer[-self.length :]
        return before[-1:] in ("", ".") and self.regex.fullmatch(end) is not None


class Patterned(NamedTuple):
    """A number for all layers but those that a pattern fits."""

    default: float | None
    patterns: Sequence[tuple[Pattern, float]]

    def of(self, layer: str) -> float | None:
        """Return the number of the first pattern that fits, as PEFT's `get_pattern_key` has it."""
        return next((number for pattern, number in self.patterns if pattern.fits(layer)), self.default)


class PeftLora(NamedTuple):
    """What of PEFT's `LoraConfig` says how strongly layers act."""

    alpha: Patterned
    rank: Patterned
    rank_stabilized: bool
    dora: bool | None

    def of(self, layer: str) -> Scaling:
        return Scaling(self.alpha.of(layer), self.rank_stabilized, self.rank.of(layer), self.dora)


class ScalingRules:
    """PEFT's rules by component; those of "" hold for every other component.

    Comparing a layer with an expression holds up every other thread: `seconds` is what all layers may take.
    """

    def __init__(self, configs: Mapping[str, PeftLora], seconds: float) -> None:
        self._configs = configs
        self._seconds = seconds

    def require_components(self, present: Collection[str]) -> None:
        """Raises UnusableAdapter for rules of a component that the base model has not: they would act on nothing."""
        if others := self._configs.keys() - {*present, *DENOISERS, ""}:
            raise UnusableAdapter(
                f"its metadata have a lora_alpha for {', '.join(sorted(others))}, which the base model lacks"
            )

    def of(self, component: str, layer: str) -> Scaling:
        """Raises UnusableAdapter when the patterns take too long."""
        names = (*DENOISERS, "") if component in DENOISERS else (component, "")
        config = next((self._configs[name] for name in names if name in self._configs), None)
        if config is None:
            return UNTOLD
        began = time.thread_time()
        scaling = config.of(layer)
        self._seconds -= time.thread_time() - began
        if self._seconds < 0:
            raise UnusableAdapter("alpha_pattern: its expressions take too long to compare with the layers")
        return scaling


def scaling_rules(
    metadata: Mapping[str, str], peft_config: Mapping[str, Any] | None, *, seconds: float = math.inf
) -> ScalingRules:
    """Raises UnusableAdapter for a configuration that this engine does not compute, or that contradicts another."""
    configs: dict[str, PeftLora] = {}
    plain = _plain_fields(metadata)
    for place, by_component in (("adapter_config.json", {"": peft_config}), (METADATA, _diffusers_fields(metadata))):
        for component, fields in by_component.items():
            if fields is not None:
                configs[component] = _lora_config(fields, place)
    for component, fields in plain.items():
        if "lora_alpha" in fields:
            config = _lora_config(fields, "metadata")
            if configs.setdefault(component, config).alpha.default != config.alpha.default:
                told = configs[component].alpha.default
                raise UnusableAdapter(f"lora_alpha is {config.alpha.default} by its metadata, {told} by PEFT's")
    return ScalingRules(configs, seconds)


def _diffusers_fields(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return diffusers' fields by component; a single component may have the name ""."""
    fields: dict[str, dict[str, Any]] = {}
    try:
        for name, value in json.loads(metadata.get(METADATA, "{}")).items():
            component, _, field = name.rpartition(".")
            fields.setdefault(component, {})[field] = value
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableAdapter(f"{METADATA} is not a JSON object") from error
    return fields


def _plain_fields(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what the header itself tells as text, by component."""
    fields: dict[str, dict[str, Any]] = {}
    for name, text in metadata.items():
        component, _, spelled = name.rpartition(".")
        field = PLAIN_METADATA.get(spelled)
        if field is None or text in ("", "None") or (field == "r" and text.lower() == "dynamic"):
            continue
        try:
            value = json.loads(text.lower())
        except (ValueError, RecursionError):
            value = text
        if fields.setdefault(component, {}).setdefault(field, value) != value:
            raise UnusableAdapter(f"metadata: two values of {field}: {fields[component][field]} and {value}")
    return fields


def _lora_config(fields: Mapping[str, Any], place: str) -> PeftLora:
    kind = str(fields.get("peft_type") or "LORA").upper()
    if kind != "LORA":
        raise UnusableAdapter(f"{place}: a PEFT {kind} adapter, only LORA is supported: train one with LoraConfig")
    named = [name for name in UNSUPPORTED if fields.get(name)]
    if named:
        raise UnusableAdapter(f"{place}: {', '.join(named)} not supported: train and save the adapter without it")
    if str(fields.get("bias") or "none") != "none":
        raise UnusableAdapter(f"{place}: bias {fields['bias']!r} is not supported, only 'none'")
    if str(fields.get("init_lora_weights")).lower().startswith(CHANGED_BASES):
        raise UnusableAdapter(
            f"{place}: trained from changed base weights ({fields['init_lora_weights']}); "
            "save it converted to plain LoRA"
        )
    dora = fields.get("use_dora")
    return PeftLora(
        _patterned(fields, "lora_alpha", "alpha_pattern", PEFT_ALPHA, place),
        _patterned(fields, "r", "rank_pattern", None, place),
        bool(fields.get("use_rslora")),
        None if dora is None else bool(dora),
    )


def _patterned(fields: Mapping[str, Any], name: str, pattern: str, default: float | None, place: str) -> Patterned:
    written = fields.get(pattern) or {}
    if not isinstance(written, dict):
        raise UnusableAdapter(f"{place}: {pattern} is no object")
    numbers = cast(Mapping[str, Any], written)
    return Patterned(
        _number(fields[name], name, place) if name in fields else default,
        [(_pattern(key, pattern, place), _number(number, pattern, place)) for key, number in numbers.items()],
    )


def _number(value: Any, name: str, place: str) -> float:
    if str(value).lower() == "dynamic":
        return DYNAMIC
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise UnusableAdapter(
            f"{place}: {name} is not a number but {ascii(value)[:40]}: write the number, or leave it out"
        )
    return float(value)


def _pattern(key: str, name: str, place: str) -> Pattern:
    if _PLAIN.fullmatch(key):
        return Pattern(re.compile(key), len(key))
    try:
        return Pattern(re.compile(rf"(.*\.)?({key})$"), 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnusableAdapter(f"{place}: {name} has a key that is no pattern") from error
