"""How strongly each layer's change acts by PEFT's configuration: `lora_alpha`, `alpha_pattern`, `use_rslora`."""

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from serve_app.engine.adapters.errors import UnusableAdapter

if TYPE_CHECKING:  # importing PEFT takes two seconds: only an adapter that needs it pays
    from peft import LoraConfig

METADATA = "lora_adapter_metadata"
"""Where diffusers keeps the configuration of each component: `{"unet.lora_alpha": 8, …}`."""
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that train on another base weight: without it the difference cannot be applied."""
UNSUPPORTED = ("lora_bias", "modules_to_save", "target_parameters", "layer_replication", "use_qalora", "use_bdlora",
               "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config")  # fmt: skip


class Scaling(NamedTuple):
    """alpha of a layer, and whether it is divided by the root of the rank (Kalajdzievski 2023) instead of the rank."""

    alpha: float | None
    rank_stabilised: bool


UNTOLD = Scaling(None, False)


class ScalingRules:
    """PEFT's rules by component, from a folder's configuration or from the metadata of diffusers' files."""

    def __init__(self, configs: Mapping[str, "LoraConfig"], every: "LoraConfig | None") -> None:
        self._configs, self._every = configs, every

    def of(self, component: str, layer: str) -> Scaling:
        config = self._configs.get(component, self._every)
        if config is None:
            return UNTOLD
        from peft.utils.other import get_pattern_key

        pattern = cast(Mapping[str, float], config.alpha_pattern or {})
        key = get_pattern_key(list(pattern), layer)
        return Scaling(float(pattern.get(key, config.lora_alpha)), bool(config.use_rslora))


def scaling_rules(metadata: Mapping[str, str], peft_config: Mapping[str, Any] | None) -> ScalingRules:
    """Raises UnusableAdapter for a configuration that this engine does not compute."""
    if peft_config is not None:
        return ScalingRules({}, _lora_config(peft_config, "adapter_config.json"))
    if METADATA not in metadata:
        return ScalingRules({}, None)
    try:
        flat = json.loads(metadata[METADATA])
        fields: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            component, _, field = name.partition(".")
            fields.setdefault(component, {})[field] = value
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableAdapter(f"{METADATA} is not a JSON object") from error
    return ScalingRules({component: _lora_config(row, METADATA) for component, row in fields.items()}, None)


def _lora_config(fields: Mapping[str, Any], place: str) -> "LoraConfig":
    from peft import LoraConfig, PeftConfig

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
            f"{place}: trained from changed base weights ({fields['init_lora_weights']}); save it converted to plain LoRA"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fields of a newer PEFT: those that change the result are refused above
            config = PeftConfig.from_peft_type(**{"r": 8, **fields, "peft_type": "LORA"})
    except (TypeError, ValueError, KeyError) as error:
        raise UnusableAdapter(f"{place}: {error}") from error
    assert isinstance(config, LoraConfig)
    return config
