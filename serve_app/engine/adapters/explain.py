"""Says in plain words why a file does not fit: another base model, kind of file or algorithm."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from serve_app.engine.adapters.layer_table import LayerTable

KINDS: Sequence[tuple[str, str]] = (
    (r"\.(oft_blocks|oft_diag|oft_R|rescale)\b|\.oft_", "OFT"),
    (r"\.boft_", "BOFT"),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
    (r"\.(w_norm|b_norm)$", "normalization layers (train_norm)"),
    (r"\.(diff|diff_b)$", "full-weight difference"),
    (r"lora_B\.(?:\w+\.)?bias$|lora_up\.bias$", "LoRA with a bias (lora_bias)"),
)
"""Parts of names that tell an algorithm which cannot be used, and what a refusal calls it."""

LOOKS: Sequence[tuple[str, str]] = (
    (r"(?:^|[._])(double_blocks|single_blocks|single_transformer_blocks)[._]", "a Flux LoRA"),
    (r"(?:^|[._])(joint_blocks|joint_transformer_blocks)[._]", "an SD 3 LoRA"),
    (r"^(emb_params|string_to_param|clip_[lg])$", "a textual inversion"),
    (r"^(control_model|controlnet|lora_controlnet)[._]", "a ControlNet"),
    (r"^(first_stage_model|decoder|encoder|post_quant_conv)\.", "a VAE"),
    (r"(?:^|[._])transformer_blocks[._]\d+[._](attn|img_mlp|txt_mlp)[._]", "a LoRA of a diffusion transformer"),
    (r"^(transformer|lora_transformer)[._]", "a LoRA of a diffusion transformer"),
    (r"(?:^|[._])blocks[._]\d+[._](self_attn|cross_attn|ffn)[._]", "a LoRA of a video model"),
    (r"^(lora_prior)", "a Kandinsky or Cascade LoRA"),
    (r"^(model\.)?diffusion_model\.(?!.*lora_).*\.(weight|bias)$", "a whole checkpoint"),
    (r"^(conv_in|time_embedding\.linear_1|down_blocks\.0\.resnets\.0\.conv1)\.(weight|bias)$", "a whole UNet"),
)
FAMILIES = {768: "SD 1", 1024: "SD 2", 2048: "SDXL"}
"""The width of the text embeddings that cross attention reads tells the family."""
DECLARED: Mapping[str, Sequence[tuple[str, str]]] = {
    "ss_base_model_version": (
        ("sdxl", "SDXL"), ("sd_v1", "SD 1"), ("sd_v2", "SD 2"), ("sd3", "SD 3"), ("flux", "Flux"),
    ),
    "modelspec.architecture": (
        ("stable-diffusion-xl", "SDXL"), ("stable-diffusion-v1", "SD 1"), ("stable-diffusion-v2", "SD 2"),
        ("stable-diffusion-3", "SD 3"), ("flux", "Flux"),
    ),
    "base_model_name_or_path": (
        (r"[\w-]+/stable-diffusion-xl-", "SDXL"), (r"[\w-]+/stable-diffusion-v1-", "SD 1"),
        (r"[\w-]+/stable-diffusion-2", "SD 2"), (r"[\w-]+/stable-diffusion-3", "SD 3"), (r"[\w-]+/FLUX", "Flux"),
    ),
}  # fmt: skip
"""Families by how the values begin that sd-scripts, the model metadata standard and PEFT write; any other says nothing.
"""
_CROSS_ATTENTION = re.compile(
    r"attn2[._]to_[kv]\.(?:lora_down|lora_A|lora\.down)(?:\.\w+)?\.weight|attn2[._]to_[kv]\.hada_w1_b"
)
_XL_TEXT = re.compile(r"^(lora_te2_|text_encoder_2\.|clip_g\.|text_encoders\.clip_g\.)")


def explain(unplaced: Sequence[str], tensors: Mapping[str, Tensor], table: LayerTable) -> str:
    """Return the message for keys that belong to no layer."""
    shown = ", ".join(sorted(unplaced)[:5]) + (f" and {len(unplaced) - 5} more" if len(unplaced) > 5 else "")
    kinds = _matches(KINDS, unplaced)
    if kinds:
        return f"{' and '.join(kinds)} weights are not supported: {shown}"
    looks = _matches(LOOKS, unplaced)
    if looks:
        return f"looks like {looks[0]}, this base is {base_name(table)}: {shown}"
    family = family_of(tensors)
    if family and family != base_name(table):
        return f"{_looks_like(family)}, this base is {base_name(table)}: {shown}"
    return f"the base model has no such layers: {shown}"


def wrong_family(tensors: Mapping[str, Tensor], table: LayerTable, declared: Mapping[str, str]) -> str | None:
    """Return the message for a file of another family whose names all happen to fit, else None.

    What `declared` (the file's metadata, PEFT's configuration) says of the base decides only where no shape does. A
    file of the first text encoder alone, under names that both use (`clip_l.`, `text_encoder.`, PEFT's folder) and
    without metadata, is undecidable: SD 1 and SDXL have the same CLIP-L, and it acts on either. So is a base of unusual
    widths, distinguished from SDXL by its one text encoder alone.
    """
    own = base_name(table)
    family = family_of(tensors)
    if family and own in FAMILIES.values() and family != own:
        return f"{_looks_like(family)}, this base is {own}"
    if "text_encoder_2" in table.components and any(name.startswith("lora_te_") for name in tensors):
        return f"looks like an SD 1 LoRA (its text encoder is called lora_te), this base is {own}"
    if family is None and (claim := _declared_family(declared)) is not None and not _may_be(claim.family, table):
        return f"{_looks_like(claim.family)} ({claim.field}: {claim.value[:60]}), this base is {own}"
    return None


class Claim(NamedTuple):
    """The family that a file names, where and in which words."""

    family: str
    field: str
    value: str


def _declared_family(declared: Mapping[str, str]) -> Claim | None:
    for field, rules in DECLARED.items():
        for pattern, family in rules:
            if re.match(pattern, declared.get(field, ""), re.IGNORECASE):
                return Claim(family, field, declared[field])
    return None


def _may_be(family: str, table: LayerTable) -> bool:
    own = base_name(table)
    if own in FAMILIES.values():
        return family == own
    return family in ("SD 1", "SD 2")  # a small model of that architecture, with one text encoder


def _looks_like(family: str) -> str:
    return f"looks like {'an' if family.startswith('S') else 'a'} {family} LoRA"


def family_of(tensors: Mapping[str, Tensor]) -> str | None:
    """Return SD 1, SD 2 or SDXL by what the file's cross attention reads, or by a second text encoder."""
    widths = {tensor.shape[1] for name, tensor in tensors.items() if tensor.dim() > 1 and _CROSS_ATTENTION.search(name)}
    if len(widths) == 1 and (family := FAMILIES.get(widths.pop())):
        return family
    return "SDXL" if any(_XL_TEXT.match(name) for name in tensors) else None


def base_name(table: LayerTable) -> str:
    if "text_encoder_2" in table.components:
        return "SDXL"
    return FAMILIES.get(table.context_width or 0) or table.name or "of no family that has a name"


def _matches(rules: Iterable[tuple[str, str]], names: Iterable[str]) -> list[str]:
    names = list(names)
    return [kind for pattern, kind in rules if any(re.search(pattern, name) for name in names)]
