"""Says in plain words why a file does not fit: another base model, kind of file or algorithm."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from serve_app.domain.families import FAMILIES, FLUX, MARKS, OTHERS, Marks, with_article
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.adapters.source import PEFT_BASE

Shape = Sequence[int]

AS_LORA = "save it as LoRA, DoRA, LoHa, LoKr or LyCORIS' IA³"
IN_FULL = "save it in floating point without scales, such as float16 or bfloat16"
KINDS: Sequence[tuple[str, str, str]] = (
    (r"[._](weight_scale(_\w+)?|scale_weight|scale_input|input_scale|comfy_quant)$", "float8 or 4-bit (with scales)",
     IN_FULL),
    (r"\.(nested_)?(absmax|quant_map)$|[._]quant_state\b|bitsandbytes__", "4-bit (bitsandbytes' nf4 or fp4)", IN_FULL),
    (r"\.(qweight|qzeros|g_idx|wscales|wzeros|SCB|_data|_scale|_packed)$", "quantized", IN_FULL),
    (r"\blora_embedding_[AB]\b|(embed_tokens|(token|position)_embedding)\.(?!weight$)|[._]trainable_tokens_",
     "text embedding (token_embedding)", "train and save it without the embedding among its target modules"),
    (r"\.(oft_blocks|oft_diag|oft_R|rescale)\b|\.oft_", "OFT", AS_LORA),
    (r"\.boft_", "BOFT", AS_LORA),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA", AS_LORA),
    (r"\.(w_norm|b_norm)$", "normalization layers (train_norm)", AS_LORA),
    (r"\.(diff|diff_b)$", "full-weight difference", AS_LORA),
    (r"\.(set_weight|reshape_weight)$", "whole layers of ComfyUI (set_weight, reshape_weight)",
     "extract a LoRA from the model that it was taken from"),
    (r"lora_B\.(?:\w+\.)?bias$|lora_up\.bias$", "LoRA with a bias (lora_bias)", AS_LORA),
    (r"\.ia3_l\b", "PEFT IA³", AS_LORA),
    (r"\bvera_(A|B|lambda)", "VeRA", AS_LORA),
    (r"\.(lora_E|ranknum)\b", "AdaLoRA", AS_LORA),
    (r"\.lora_diag\b", "KaSA (kasa_config)", AS_LORA),
    (r"\bmodules_to_save\b", "whole layers (modules_to_save)", AS_LORA),
    (r"(?:^|\.)(adamss|beft|c3a|deft|delora|fourierft|frod|glora|gralora|hira|hra|lily|ln_tuning|miss|osf|peanut|poly"
     r"|psoft|pvera|randlora|road|shadow|shira|supertuning|tinylora|unilora|vblora|waveft)_\w+", r"PEFT \1", AS_LORA),
)  # fmt: skip
"""Parts of names that tell an algorithm which cannot be used, what a refusal calls it, and what its owner can do."""
_OF_ADAPTERS = re.compile("|".join(["lora|hada_|lokr_|magnitude|on_input|alpha$", *(row[0] for row in KINDS[3:])]))
"""A whole model has weights and no tensor whose name holds one of these."""
_WEIGHT = re.compile(r"\.(weight|bias)$")

OTHER_FAMILY = "choose a base model of that family, or a LoRA for this one"
NO_FAMILY = "no base model of that family can be served, choose a LoRA for this one"
ONLY_LORAS = "this service loads LoRAs onto a base model, no other networks"
WHOLE_MODEL = "choose the LoRA's own file; an operator may add this one as a base model"
LOOKS: Sequence[tuple[str, str, str]] = (
    (r"^(model\.)?diffusion_model\.", "a whole checkpoint", WHOLE_MODEL),
    (r"\blllite_", "a ControlNet-LLLite", ONLY_LORAS),
    (r"^(image_proj(_model)?|ip_adapter)\.|to_[kv]_ip\b", "an IP-Adapter", ONLY_LORAS),
    (r"motion_modules|temporal_transformer", "an AnimateDiff motion module", ONLY_LORAS),
    (r"^(hypernetwork\.|\d{3,4}\.)[\d.]*(linear|weight|bias)", "a hypernetwork", ONLY_LORAS),
    (r"RRDB_trunk|\.(RDB|rdb)[1-3]\.|^conv_body\.", "an upscaler (ESRGAN)", ONLY_LORAS),
    (r"^(adapter\.)?body\.\d+\.(block[12]|in_conv|down|resnets)\b", "a T2I-Adapter", ONLY_LORAS),
    (r"^(emb_params|string_to_param|clip_[lg])$", "a textual inversion", ONLY_LORAS),
    (r"^(control_model|controlnet|lora_controlnet|controlnet_cond_embedding|controlnet_down_blocks|input_hint_block)[._]",
     "a ControlNet", ONLY_LORAS),
    (r"^(lora_te3_|text_encoder_3\.|t5xxl\.)", "an SD 3 or Flux LoRA (it has a third text encoder)", OTHER_FAMILY),
    (r"(?<!\d[._])transformer_blocks[._]\d+[._](attn|norm|ff)", "a LoRA of a diffusion transformer", OTHER_FAMILY),
    (r"^(transformer|lora_transformer)[._]", "a LoRA of a diffusion transformer", OTHER_FAMILY),
    (r"^(text_encoder\.|text_encoders\.qwen3_\w+\.transformer\.|lora_te1?_)(model[._])?layers[._]\d+[._]",
     "a LoRA of Qwen3, the text encoder of Z-Image, FLUX.2 klein and Anima", OTHER_FAMILY),
    (r"(?:^|[._])blocks[._]\d+[._](self_attn|cross_attn)[._]", "a LoRA of a video model", OTHER_FAMILY),
    (r"(?:^|\.)model\.layers\.\d+\.(self_attn|mlp|linear_attn)\b", "a language model, or a LoRA of one", ONLY_LORAS),
    (r"^(lora_prior)", "a Kandinsky or Cascade LoRA", OTHER_FAMILY),
    (r"^(first_stage_model|decoder|encoder|post_quant_conv)\.", "a VAE", ONLY_LORAS),
    (r"^(conv_in|time_embedding\.linear_1|down_blocks\.0\.resnets\.0\.conv1)\.(weight|bias)$", "a whole UNet",
     WHOLE_MODEL),
)  # fmt: skip
"""What names say of the kind of file, and what its owner can do; the architectures are asked before those of a LoRA."""
TEXT_WIDTHS = {marks.text_width: marks.name for marks in MARKS if marks.text_width}
"""The width of the text embeddings that cross attention reads tells the family."""
_DECLARED = [(marks.declared, marks.name) for marks in MARKS if marks.declared]
DECLARED: Mapping[str, Sequence[tuple[str, str]]] = {
    "ss_base_model_version": _DECLARED,
    "modelspec.architecture": _DECLARED,
    PEFT_BASE: [(rf"[\w-]+/{marks.repository}", marks.name) for marks in MARKS if marks.repository],
}
"""Families by how values in the fields of sd-scripts, ai-toolkit, the model metadata standard and PEFT begin; any other
value says nothing."""
_UNET_READS_TEXT = r"(?:down|up|mid|input|output|middle)_blocks?[._].*attn2[._]to_[kv]\b"
_CROSS_ATTENTION = re.compile(rf"{_UNET_READS_TEXT}(?:\.(?:lora_down|lora_A|lora\.down)(?:\.\w+)?\.weight|\.hada_w1_b)")
_READS_TEXT = re.compile(rf"{_UNET_READS_TEXT}|to_[kv]_ip\b|^emb_params$")
_BLOCKS: Sequence[tuple[str, str]] = (
    (r"attentions[._]\d[._]transformer_blocks[._][1-9]|up_blocks[._]0[._]attentions|add_embedding|label_emb", "SDXL"),
    (r"(in|out)put_blocks[._]\d[._]1[._]transformer_blocks[._][1-9]|middle_block[._]1[._]transformer_blocks[._][1-9]",
     "SDXL"),
    (r"(down|up)_blocks[._]3[._]|down_blocks[._]0[._]attentions|input_blocks[._][12][._]1[._]", "SD 1 or SD 2"),
    (r"(in|out)put_blocks[._](9|10|11)[._]", "SD 1 or SD 2"),
    (r"^(lora_te_|lora_te1_|clip_l\.|text_encoder\.).*text_model[._]encoder[._]", "SD 1 or SD 2 or SDXL"),
)  # fmt: skip
"""Names of blocks, and the architecture that has them: they tell it where this base model lacks such blocks."""
_SHARED: Sequence[tuple[str, Sequence[str]]] = (
    (r"^(lora_te1_|clip_l\.|text_encoder\.)", ("SD 1", "SDXL", "FLUX.1")),
    (r"^(lora_te1?_|text_encoder\.|text_encoders\.qwen3_4b\.)", ("Z-Image", "FLUX.2 klein 4B")),
    (r"(down_blocks[._][12]|mid_block)[._]attentions[._]\d[._]transformer_blocks[._]0[._](attn1|ff|attn2[._]to_(q|out))",
     ("SD 1", "SD 2", "SDXL")),
    (r"transformer_blocks[._]0[._](attn1|ff|attn2[._]to_(q|out))|_blocks[._]\d[._](resnets|\w+samplers)",
     ("SD 1", "SD 2")),
)  # fmt: skip
"""Layers of the same name and shape in several families."""
_DOWN = ("lora_down", "lora_A", "lora.down", "lora_linear_layer.down", "hada_w1_b")
_FACTOR = re.compile(r"(.+?)\.(lora_down|lora_up|lora_[AB]|lora(?:_linear_layer)?\.(?:down|up)|hada_w1_[ab])\b")
INPUTS, OUTPUTS, GROUPED = range(3)
_KLEIN_4B, _KLEIN_9B, _DEV, _QWEN_21 = "FLUX.2 klein 4B", "FLUX.2 klein 9B", "FLUX.2 dev", "Qwen-Image 2.1"
_BLOCK = r"(?<!single_)transformer_blocks[._]\d+[._]"
_SIZES: Sequence[tuple[str, int, Mapping[int, str]]] = (
    (r"(single_blocks[._]\d+[._]linear1|[._]to_qkv_mlp_proj)$", OUTPUTS,
     {21504: "FLUX.1", 27648: _KLEIN_4B, 36864: _KLEIN_9B, 55296: _DEV}),
    (r"single_(blocks[._]\d+[._]linear2|transformer_blocks[._]\d+[._]attn[._]to_out)$", INPUTS,
     {15360: "FLUX.1", 12288: _KLEIN_4B, 16384: _KLEIN_9B, 24576: _DEV}),
    (r"((img|txt)_mlp[._]0|ff(_context)?[._]linear_in)$", OUTPUTS,
     {12288: "FLUX.1", 18432: _KLEIN_4B, 24576: _KLEIN_9B, 36864: _DEV}),
    (rf"{_BLOCK}img_mlp[._](gate_up|gate_layer|proj|out)$", INPUTS, {4096: _QWEN_21, 12288: _QWEN_21}),
    (rf"{_BLOCK}attn[._]to_[kv]$", GROUPED, {1536: "Krea 2"}),
    (rf"{_BLOCK}attn[._]to_q$", INPUTS, {6144: "FLUX.2 dev or Krea 2"}),
    (rf"((img|txt)_attn[._]qkv|{_BLOCK}attn[._]add_[qkv]_proj)$", INPUTS,
     {4096: _KLEIN_9B, 6144: _DEV, 3584: "HunyuanImage"}),
    (rf"{_BLOCK}attn[._]to_([qkv]|out[._]0)$", INPUTS, {4096: f"{_KLEIN_9B} or {_QWEN_21}", 3584: "HunyuanImage"}),
    (rf"{_BLOCK}attn[._]add_[qkv]_proj$", INPUTS,
     {1536: "SD 3", 2432: "SD 3", 3072: f"FLUX.1 or {_KLEIN_4B} or Qwen-Image"}),
    (r"blocks[._]\d+[._]self_attn[._][qkv]_proj$", INPUTS, {4096: "Cosmos", 5120: "Cosmos"}),
    (rf"{_BLOCK}attn[12][._]to_[qkv]$", INPUTS,
     {2048: "Anima or LTX", 4096: "Cosmos or LTX-2", 2240: "Sana", 1152: "PixArt", 2560: "CogView4 or GLM-Image"}),
    (r"layers[._]\d+[._]attention[._](to_[qkv]|qkv)$", INPUTS, {4608: "Ideogram 4", 3584: "Bria FIBO 2"}),
)  # fmt: skip
"""Layers that several architectures have, and one of their sizes, which tells one or two of them."""
_XL_TEXT = re.compile(
    r"^((lora_te2_|text_encoder_2\.)(?!(encoder[._])?block[._])|clip_g(\.|$)|text_encoders\.clip_g\.)"  # T5 has blocks
)
_KNOWN_BY_SIZE = ("FLUX.2", "Z-Image")
"""Served architectures that have layers of others, or sizes of their own, by which they are told first."""


def explain(unplaced: Sequence[str], shapes: Mapping[str, Shape], table: LayerTable) -> str:
    """Return the message for keys that belong to no layer; it lists some where it names no other family."""
    shown = ", ".join(sorted(unplaced)[:5]) + (f" and {len(unplaced) - 5} more" if len(unplaced) > 5 else "")
    is_whole = not any(_OF_ADAPTERS.search(name) for name in unplaced) and any(map(_WEIGHT.search, unplaced))
    transformer = _transformer(shapes, unplaced)
    family = transformer or _unet(shapes, unplaced)
    made_for = f" for {family}" if family else ""
    kinds = [(match.expand(kind), advice) for pattern, kind, advice in KINDS if (match := _first(pattern, unplaced))]
    if kinds and not is_whole:
        named = " and ".join(kind for kind, _ in kinds)
        return f"{named} weights{made_for} are not supported, {kinds[0][1]}: {shown}"
    base = f"this base is {base_name(table)}"
    own = [".".join(layer) for layer in table.shapes]
    is_of_other = family is not None and base_name(table) not in family.split(" or ")
    for pattern, look, advice in LOOKS:
        if advice == OTHER_FAMILY and not is_whole:
            if transformer and is_of_other:
                return _looks_like(transformer, base)
            if _first(pattern, unplaced) and not any(re.search(pattern, name) for name in own):
                return f"looks like {look}, {base}: {advice}"
        elif advice != (OTHER_FAMILY if is_whole else WHOLE_MODEL) and _first(pattern, unplaced):
            return f"looks like {look}{made_for}, {base}: {advice}: {shown}"
    if is_whole:
        return f"looks like a whole model or a part of one{made_for}, {base}: {WHOLE_MODEL}: {shown}"
    if parts := {part for name in unplaced[:20] if (part := _unknown_part(name, table))}:
        return f"weights called {', '.join(sorted(parts)[:5])} are not supported, {AS_LORA}: {shown}"
    if family and is_of_other:
        return _looks_like(family, base)
    return f"the base model has no such layers: {shown}"


def _unknown_part(name: str, table: LayerTable) -> str:
    """Return what a tensor is called within a layer that the base model has; empty where it has no such layer."""
    dots = [place.start() for place in re.finditer(r"\.", name)]
    return next((name[dot + 1 :] for dot in reversed(dots) if table.find(name[:dot])), "")


def wrong_family(shapes: Mapping[str, Shape], table: LayerTable, declared: Mapping[str, str]) -> str | None:
    """Return the message for a file of another family whose names all happen to fit, else None.

    What `declared` (the file's metadata, PEFT's configuration) says of the base decides only where no shape does. A
    file of the first text encoder alone, under names that both use (`clip_l.`, `text_encoder.`, PEFT's folder) and
    without metadata, is undecidable: SD 1 and SDXL have the same CLIP-L, and it acts on either. So is a base of unusual
    widths, distinguished from SDXL by its one text encoder alone.
    """
    own = base_name(table)
    family = family_of(shapes)
    if family and base_family(table) not in (None, *family.split(" or ")):
        return _looks_like(family, f"this base is {own}")
    if own == "SDXL" and any(name.startswith("lora_te_") for name in shapes):
        return f"looks like an SD 1 LoRA (its text encoder is called lora_te), this base is {own}: {OTHER_FAMILY}"
    if family is None and (claim := _declared_family(declared)) is not None and not _may_be(claim.family, table):
        return _looks_like(claim.family, f"this base is {own}", said=f" ({claim.field}: {claim.value[:60]})")
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
    if own := base_family(table):
        return own.casefold().startswith(family.casefold())
    return family in ("SD 1", "SD 2")  # a small model of that architecture, with one text encoder


def _looks_like(family: str, base: str, said: str = "") -> str:
    is_served = any(map(_is_served, family.split(" or ")))
    return f"looks like {with_article(family)} LoRA{said}, {base}: {OTHER_FAMILY if is_served else NO_FAMILY}"


def _is_served(family: str) -> bool:
    if any(family == marks.name for marks in OTHERS):  # "Qwen-Image" is not, though "Qwen-Image 2.1" is
        return False
    name, served = family.casefold(), [marks.name.casefold() for marks in _served()]
    return any(name.startswith(own) or own.startswith(name) for own in served)


def family_of(shapes: Mapping[str, Shape]) -> str | None:
    """Return SD 1, SD 2 or SDXL by the width of the text embeddings that its cross attention takes.

    A second text encoder also tells SDXL, and the sizes of layers tell diffusion transformers apart; where two have
    the same it is "FLUX.1 or FLUX.2 klein 4B".
    """
    widths = {shape[1] for name, shape in shapes.items() if len(shape) > 1 and _CROSS_ATTENTION.search(name)}
    if len(widths) == 1 and (family := TEXT_WIDTHS.get(widths.pop())):
        return family
    layers = _sides(shapes)
    for pattern, side, sizes in _SIZES:
        found = {sides[side] for name, sides in layers.items() if re.search(pattern, name)}
        if family := next((sizes[size] for size in found if size in sizes), None):
            return family
    return "SDXL" if any(_XL_TEXT.match(name) for name in shapes) else None


def _sides(shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int, int]]:
    """Return inputs, outputs, and outputs that are fewer than the inputs, of each layer by its factors; 0: unknown."""
    inputs, outputs = dict[str, int](), dict[str, int]()
    for name, shape in shapes.items():
        if (match := _FACTOR.match(name)) and len(shape) > 1:
            stem, is_down = match[1], match[2] in _DOWN
            (inputs if is_down else outputs)[stem] = shape[1] if is_down else shape[0]
    return {
        stem: (width := inputs.get(stem, 0), size := outputs.get(stem, 0), size if size < width else 0)
        for stem in {**inputs, **outputs}
    }


def _transformer(shapes: Mapping[str, Shape], unplaced: Sequence[str]) -> str | None:
    """Return the diffusion transformer by names that no other has, then by sizes, then by names of several."""
    served = [marks for marks in _served() if marks.name not in _KNOWN_BY_SIZE]
    particular = next(iter(_matches(_layers([*FAMILIES["anima"].marks, *OTHERS, *served]), unplaced)), None)
    family = particular or family_of(shapes)
    if family and not any(family.startswith(name) for name in TEXT_WIDTHS.values()):
        return family
    return next(iter(_matches(_layers([*_served(), FLUX]), unplaced)), None)


def _unet(shapes: Mapping[str, Shape], unplaced: Sequence[str]) -> str | None:
    """Return `family_of`, else the family by any tensor that reads text, or by the blocks that this base lacks."""
    if family := family_of(shapes):
        return family
    widths = {shape[-1] for name, shape in shapes.items() if shape and _READS_TEXT.search(name)}
    if len(families := [TEXT_WIDTHS[width] for width in widths if width in TEXT_WIDTHS]) == 1:
        return families[0]
    return next(iter(_matches(_BLOCKS, unplaced)), None)


def _served() -> Sequence[Marks]:
    return [marks for family in FAMILIES.values() for marks in family.marks]


def _layers(of: Iterable[Marks]) -> Sequence[tuple[str, str]]:
    return [(marks.layers, marks.name) for marks in of if marks.layers]


def also_fits(shapes: Mapping[str, Shape], table: LayerTable, declared: Mapping[str, str]) -> list[str]:
    """Return the other families here that the file could be for: their layers are alike, and the file names none."""
    own = base_name(table)
    if _declared_family(declared):
        return []
    if family := family_of(shapes):
        return [other for other in family.split(" or ") if other != own and _is_served(other)]
    for pattern, families in _SHARED:
        if own in families and all(re.search(pattern, name) for name in shapes):
            return [family for family in families if family != own]
    return []


def base_family(table: LayerTable) -> str | None:
    """Return the family of a base model by its layers and parts; None for one of unusual sizes."""
    if family := next(
        iter(_matches(_layers(_served()), [*table.components[table.denoiser].layers, *table.components])), None
    ):
        outputs = {shape[0] for (_, layer), shape in table.shapes.items() if layer.endswith(".to_qkv_mlp_proj")}
        _, _, sizes = _SIZES[0]
        return next((sizes[size] for size in outputs if size in sizes), family)
    return "SDXL" if "text_encoder_2" in table.components else TEXT_WIDTHS.get(table.context_width or 0)


def base_name(table: LayerTable) -> str:
    return base_family(table) or table.name or "of no family that has a name"


def _matches(rules: Iterable[tuple[str, str]], names: Iterable[str]) -> list[str]:
    names = list(names)
    return [kind for pattern, kind in rules if _first(pattern, names)]


def _first(pattern: str, names: Iterable[str]) -> re.Match[str] | None:
    return next(filter(None, map(re.compile(pattern).search, names)), None)
