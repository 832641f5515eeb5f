"""Reads a safetensors file in the layout of its architecture's original code, and accounts for every tensor in it.

A tensor is a weight of one of the base model's parts, a marker of how the model was trained, known to be unused, or the
reason why the file is refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from serve_app.domain.families import FAMILIES, OTHERS, Marks, with_article

PARTS: Mapping[str, tuple[str, ...]] = {
    "unet": ("model.diffusion_model.",),
    "vae": ("first_stage_model.",),
    "text_encoder": (
        "cond_stage_model.transformer.",
        "cond_stage_model.model.",
        "conditioner.embedders.0.transformer.",
    ),
    "text_encoder_2": ("conditioner.embedders.1.model.",),
}
"""How the names of each part's tensors begin: those of Stable Diffusion 1, 2 and XL."""
BESIDE_TRANSFORMER: Mapping[str, str] = {
    "text_encoder": r"text_encoders\.(qwen3(vl)?_\d+b\.(transformer\.)?(model\.)?(language_model\.)?|clip_l\.transformer\.)",
    "text_encoder_2": r"text_encoders\.t5xxl\.transformer\.",
    "text_conditioner": r"(model\.diffusion_model\.)?(net\.)?llm_adapter\.|text_conditioner\.",
    "vae": r"(vae|first_stage_model)\.",
}
"""How names of the parts begin that files of a diffusion transformer may hold beside it, as ComfyUI saves them."""
MARKERS = ("v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_min", "edm_vpred.sigma_max")
"""Tensors that say how a checkpoint was trained, in files of NoobAI and A1111, of Playground 2.5 and of CosXL."""
OTHER_KINDS = {
    r"conditioner\.embedders\.0\.model\..+": "is an SDXL refiner, which only repaints; give its base model",
    r"control_model\..+": "is a ControlNet, which this service does not run; give a base model",
    **{
        rf"(model\.diffusion_model\.)?{marks.checkpoint}": f"is {with_article(marks.name)}, for which there is no family"
        for marks in OTHERS
        if marks.checkpoint
    },
    r"(lora_|.+\.lora_).+": "is a LoRA; register it as an adapter",
}
_OF_DIFFUSERS = {
    r"(unet\.)?(down|up)_blocks\..+|(transformer\.)?(all_x_embedder|(single_)?transformer_blocks)\..+": "has diffusers' "
    "names; give diffusers' whole folder as `folder:`",
}


def _of_others(own: Sequence[Marks], what: str) -> dict[str, str]:
    """Return the kinds of files of served diffusion transformers but that of the config, which is called `what`."""
    return {
        rf"(model\.diffusion_model\.)?{marks.checkpoint}": f"is {with_article(marks.name)}, and its config {what}; give "
        f"as its config a diffusers folder of {marks.name}"
        for family in FAMILIES.values()
        for marks in family.marks
        if marks.checkpoint and marks not in own
    }


_ENCODER = (
    r"(text_model\.(embeddings|encoder\.layers\.\d+|final_layer_norm)\..+|transformer\.resblocks\.\d+\..+"
    r"|ln_final\.\w+|token_embedding\.weight|positional_embedding|text_projection)"
)
_READ = re.compile(
    "|".join(
        re.escape(prefix) + (_ENCODER if part.startswith("text") else ".+")
        for part, prefixes in PARTS.items()
        for prefix in prefixes
    )
)
_UNUSED = re.compile(
    r"model_ema\..+|first_stage_model\.(loss|model_ema)\..+"  # training's averages and discriminator
    r"|(sqrt_|log_)?(one_minus_)?(recip(m1)?_)?alphas_cumprod(_prev)?|betas|posterior_\w+|logvar|lvlb_weights"
    r"|denoiser\.sigmas|scale_factor|global_step"  # tables of the schedule, which the scheduler computes
    r"|text_encoders\..+\.lm_head\.weight"  # it makes words
    r"|.+\.(position_ids|logit_scale|attn_mask)|.+\.(vision_model|visual)\..+|.+\.visual_projection\.\w+"
    r"|(cond_stage_model|conditioner\.embedders\.\d)\.(logit_scale|text_projection)"  # CLIP's other half
    r"|(cond_stage_model|conditioner\.embedders\.0|text_encoders\.clip_l)\.transformer\.text_projection\.weight"
)
_SCALE = re.compile(r"(.+)\.(?:scale_weight|weight_scale)")
_SCALE_UNUSED = re.compile(r"(.+\.)?(scaled_fp8|scale_input|input_scale|comfy_quant)")
"""Inputs are not quantized here, so that their scales are unused; the others say that a file has scales."""
_SHOWN = 3

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Renames weights as diffusers names them."""


class SingleFile(NamedTuple):
    """The weights under their original names, scaled where they were quantized, and the markers by name."""

    weights: dict[str, Tensor]
    markers: dict[str, Tensor]


def read_single_file(file: Path, parts: Iterable[str], unet: Mapping[str, Any], dtype: torch.dtype) -> SingleFile:
    """Read the file of a base model of these parts, whose UNet has this configuration.

    Raises OSError, or ValueError for a file of another kind, one that lacks a part, or one with tensors nobody reads.
    """
    tensors = {_current_name(name): tensor for name, tensor in load_file(file).items()}
    others = _of_others((), "a Stable Diffusion") | _OF_DIFFUSERS
    _refuse_other_kinds(file, tensors, OTHER_KINDS | others)
    _require_parts(file, tensors, parts)
    entry = tensors.get("model.diffusion_model.input_blocks.0.0.weight")
    if entry is not None and entry.shape[1] != unet["in_channels"]:
        what = "for inpainting" if entry.shape[1] == 9 else "for editing images"
        raise ValueError(
            f"{file}: its UNet takes {entry.shape[1]} channels instead of {unet['in_channels']}: one {what} "
            "cannot draw from a prompt alone; give the checkpoint that it was made from"
        )
    markers = {name: tensors.pop(name) for name in MARKERS if name in tensors}
    weights = rescaled(file, tensors, dtype)
    refuse_unread(file, [name for name in weights if not _READ.fullmatch(name)])
    return SingleFile(weights, markers)


def part_in_file(name: str, *, of_transformer: bool) -> tuple[str, str]:
    """Return the part that a tensor is of, and its name there; of a UNet's file, whose names stay, it may be none."""
    if not of_transformer:
        return next((part for part, begins in PARTS.items() if name.startswith(begins)), ""), name
    for part, begins in BESIDE_TRANSFORMER.items():
        if prefix := re.match(begins, name):
            return part, name[prefix.end() :]
    return "transformer", name.removeprefix("model.diffusion_model.")


def read_parts(file: Path, dtype: torch.dtype, pipeline: str) -> dict[str, dict[str, Tensor]]:
    """Return the weights of a diffusion transformer's file by part, scaled where they were quantized.

    Its config is of this class of pipelines. Raises OSError, or ValueError for a file of another kind.
    """
    tensors = load_file(file)
    marks = next(family.marks for family in FAMILIES.values() if pipeline in family.pipelines)
    _refuse_other_kinds(file, tensors, OTHER_KINDS | _of_others(marks, with_article(marks[0].name)))
    parts: dict[str, dict[str, Tensor]] = {}
    for name, weight in rescaled(file, tensors, dtype).items():
        part, own = part_in_file(name, of_transformer=True)
        parts.setdefault(part, {})[own] = weight
    return parts


def fitted(
    file: Path, weights: dict[str, Tensor], module: Any, convert: Convert, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a part's weights under its module's names; the module may be on the meta device.

    `convert` is diffusers' function from the original names; names that are the module's already stay. Raises ValueError
    where a weight is missing, has no place or comes twice.
    """
    own = module.state_dict()
    others = {name: weight for name, weight in weights.items() if name not in own}
    refuse_unread(file, [name for name, weight in others.items() if not convert({name: weight}).keys() <= own.keys()])
    ours = {name: weight for name, weight in weights.items() if name in own}
    made = convert(others)
    if twice := sorted(ours.keys() & made.keys()):
        raise ValueError(f"{file}: holds {twice[0]} twice, under diffusers' name and under the original one")
    weights = ours | made
    if missing := [name for name in own if name not in weights]:
        raise ValueError(
            f"{file}: lacks weights that the architecture of its config has: {', '.join(missing[:_SHOWN])}"
        )
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            sides = (" × ".join(map(str, one.shape)) for one in (weight, own[name]))
            raise ValueError(
                f"{file}: {name} is {' instead of '.join(sides)}, as the architecture of its config has it"
            )
    precise = {*(module._keep_in_fp32_modules or ())}  # in either number type of 16 bits, as diffusers keeps them
    return {
        name: weight.to(dtype if precise.isdisjoint(name.split(".")) else torch.float32).contiguous()
        for name, weight in weights.items()
    }


_OF_WAN = {
    r"^conv1\.": "quant_conv.",
    r"^conv2\.": "post_quant_conv.",
    r"coder\.conv1\.": "coder.conv_in.",
    r"coder\.head\.0\.": "coder.norm_out.",
    r"coder\.head\.2\.": "coder.conv_out.",
    r"middle\.0\.": "mid_block.resnets.0.",
    r"middle\.1\.": "mid_block.attentions.0.",
    r"middle\.2\.": "mid_block.resnets.1.",
    r"downsamples\.(\d+)\.downsamples\.\d+\.(?=resample|time_conv)": r"down_blocks.\1.downsampler.",
    r"upsamples\.(\d+)\.upsamples\.\d+\.(?=resample|time_conv)": r"up_blocks.\1.upsampler.",
    r"(down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.": r"\1_blocks.\2.resnets.\3.",
    r"residual\.0\.": "norm1.",
    r"residual\.2\.": "conv1.",
    r"residual\.3\.": "norm2.",
    r"residual\.6\.": "conv2.",
    r"\.shortcut\.": ".conv_shortcut.",
}


def of_wan_vae(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a VAE's weights under diffusers' names, where they have those of Wan 2.2's code; others stay as they are.

    A convolution over time meets one frame alone after zeros, so that its last slice is what counts.
    """
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for theirs, ours in _OF_WAN.items():
            name = re.sub(theirs, ours, name)
        made[name] = weight[:, :, -1] if weight.dim() == 5 else weight
    return made


def refuse_unread(file: Path, names: list[str]) -> None:
    """Raise ValueError where there are tensors that no part of the base model reads."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(
            f"{file}: holds tensors that no part of its architecture reads: {', '.join(names[:_SHOWN])}{more}. Give "
            "as its config the folder of its own architecture, or leave them out of the file"
        )


def unread_by(part: str, module: Any, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of a UNet's or a VAE's tensors that its module does not take."""
    convert = convert_ldm_unet_checkpoint if part == "unet" else convert_ldm_vae_checkpoint
    names = [name for name in weights if name.startswith(PARTS[part])]
    numbered = {name: torch.full((1, 1, 1, 1), i) for i, name in enumerate(names)}
    own = module.state_dict()
    taken = {int(number) for name, number in convert(numbered, config=module.config).items() if name in own}
    return [name for i, name in enumerate(names) if i not in taken]


def _current_name(name: str) -> str:
    """Return a tensor's name; merges made before 2023 leave out `text_model`."""
    return re.sub(r"^(cond_stage_model\.transformer\.)(?=embeddings|encoder|final_layer_norm)", r"\1text_model.", name)


def _refuse_other_kinds(file: Path, names: Iterable[str], kinds: Mapping[str, str]) -> None:
    for pattern, kind in kinds.items():
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            raise ValueError(f"{file}: {kind} (it has {found})")


def _require_parts(file: Path, names: Iterable[str], parts: Iterable[str]) -> None:
    missing = [part for part in parts if not any(name.startswith(PARTS[part]) for name in names)]
    if "unet" in missing and any(name.startswith("model_ema.") for name in names):
        raise ValueError(
            f"{file}: of the UNet, it holds only the averages of training (model_ema), without their layers' names; "
            "save the checkpoint with the averages in the model's place"
        )
    if missing:
        cure = "name one with `vae:` in the catalog" if missing == ["vae"] else "give the whole checkpoint as one file"
        raise ValueError(f"{file}: holds no {', no '.join(missing)} of its config's architecture; {cure}")


def rescaled(file: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights without what is unused, and multiplied by their scales where they have some."""
    scales = {match[1] + ".weight": name for name in tensors if (match := _SCALE.fullmatch(name))}
    left_out = {
        *scales.values(),
        *(name for name in tensors if _SCALE_UNUSED.fullmatch(name) or _UNUSED.fullmatch(name)),
    }
    weights = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(
                f"{file}: {name} is quantized as {str(weight.dtype).removeprefix('torch.')}; floating point is read, "
                "and float8 with scales"
            )
    for name, scale_name in scales.items():
        scale, weight = tensors[scale_name], weights.get(name)
        if weight is None or scale.numel() not in (1, weight.shape[0]):
            raise ValueError(
                f"{file}: {scale_name} is no scale for {name}: it must have one number, or one for each output"
            )
        weights[name] = (weight.float() * scale.float().reshape(-1, *(1,) * (weight.dim() - 1))).to(dtype)
    return weights
