"""Scales each layer's change by PEFT's configuration: `lora_alpha`, `alpha_pattern`, `use_rslora`.

PEFT's own classes are not used, whose import takes seconds; a test compares with them.
"""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from serve_app.engine.adapters.layer_table import UnusableAdapter

METADATA = "lora_adapter_metadata"
"""diffusers keeps the configuration of each component under this name: `{"unet.lora_alpha": 8, …}`."""
PEFT_ALPHA = 8
"""PEFT's own alpha, which holds where a configuration names none."""
MAX_ALPHA = 1e9
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]+")
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""These initializations train on another base weight, without which the trained difference cannot be applied."""
UNSUPPORTED = ("lora_bias", "modules_to_save", "target_parameters", "layer_replication", "use_qalora", "use_bdlora",
               "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config")  # fmt: skip


class Scaling(NamedTuple):
    """A layer's alpha, divided by its rank, or by the root of it (Kalajdzievski 2023)."""

    alpha: float | None
    rank_stabilized: bool


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


class PeftLora(NamedTuple):
    """What of PEFT's `LoraConfig` says how strongly layers act."""

    alpha: float
    alpha_pattern: Sequence[tuple[Pattern, float]]
    rank_stabilized: bool

    def of(self, layer: str) -> Scaling:
        """Return the scaling of the first pattern that fits, as PEFT's `get_pattern_key` has it."""
        alphas = (alpha for pattern, alpha in self.alpha_pattern if pattern.fits(layer))
        return Scaling(next(alphas, self.alpha), self.rank_stabilized)


class ScalingRules:
    """PEFT's rules by component, from a folder's configuration or from the metadata of diffusers' files.

    Comparing a layer with an expression holds up every other thread: `seconds` is what all layers may take.
    """

    def __init__(self, configs: Mapping[str, PeftLora], every: PeftLora | None, seconds: float) -> None:
        self._configs, self._every = configs, every
        self._seconds = seconds

    def of(self, component: str, layer: str) -> Scaling:
        """Raises UnusableAdapter when the patterns take too long."""
        config = self._configs.get(component, self._every)
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
    """Raises UnusableAdapter for a configuration that this engine does not compute."""
    if peft_config is not None:
        return ScalingRules({}, _lora_config(peft_config, "adapter_config.json"), seconds)
    if METADATA not in metadata:
        return ScalingRules({}, None, seconds)
    try:
        flat = json.loads(metadata[METADATA])
        fields: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            component, _, field = name.partition(".")
            fields.setdefault(component, {})[field] = value
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableAdapter(f"{METADATA} is not a JSON object") from error
    return ScalingRules({component: _lora_config(row, METADATA) for component, row in fields.items()}, None, seconds)


def _lora_config(fields: Mapping[str, Any], place: str) -> PeftLora:
    kind = str(fields.get("peft_type") or "LORA").upper()
    if kind != "LORA":
        raise UnusableAdapter(f"{place}: a PEFT {kind} adapter, only LORA is supported")
    named = [name for name in UNSUPPORTED if fields.get(name)]
    if named:
        raise UnusableAdapter(f"{place}: {', '.join(named)} not supported")
    if str(fields.get("bias") or "none") != "none":
        raise UnusableAdapter(f"{place}: bias {fields['bias']!r} is not supported, only 'none'")
    if str(fields.get("init_lora_weights")).lower().startswith(CHANGED_BASES):
        raise UnusableAdapter(
            f"{place}: trained from changed base weights ({fields['init_lora_weights']}); "
            "save it converted to plain LoRA"
        )
    written = fields.get("alpha_pattern") or {}
    if not isinstance(written, dict):
        raise UnusableAdapter(f"{place}: alpha_pattern is no object")
    patterns = cast(Mapping[str, Any], written)
    return PeftLora(
        _number(fields.get("lora_alpha", PEFT_ALPHA), "lora_alpha", place),
        [(_pattern(key, place), _number(alpha, "alpha_pattern", place)) for key, alpha in patterns.items()],
        bool(fields.get("use_rslora")),
    )


def _number(value: Any, name: str, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise UnusableAdapter(f"{place}: {name} is not a number")
    return float(value)


def _pattern(key: str, place: str) -> Pattern:
    if _PLAIN.fullmatch(key):
        return Pattern(re.compile(key), len(key))
    try:
        return Pattern(re.compile(rf"(.*\.)?({key})$"), 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnusableAdapter(f"{place}: alpha_pattern has a key that is no pattern") from error
