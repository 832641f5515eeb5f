"""Writes a tiny model as one file in the original Stable Diffusion layout (LDM, SGM, OpenCLIP).

The way back, from these names to diffusers', is what the engine is tested for; nothing here is shared with it.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.diffusers_reference import open_pipeline

Tensors = dict[str, Tensor]

RESNET = {
    "norm1.": "in_layers.0.",
    "conv1.": "in_layers.2.",
    "time_emb_proj.": "emb_layers.1.",
    "norm2.": "out_layers.0.",
    "conv2.": "out_layers.3.",
    "conv_shortcut.": "skip_connection.",
}
UNET_TOP = {
    "conv_in.": "input_blocks.0.0.",
    "conv_norm_out.": "out.0.",
    "conv_out.": "out.2.",
    "time_embedding.linear_1.": "time_embed.0.",
    "time_embedding.linear_2.": "time_embed.2.",
    "add_embedding.linear_1.": "label_emb.0.0.",
    "add_embedding.linear_2.": "label_emb.0.2.",
}
VAE_ATTENTION = {"group_norm.": "norm.", "to_q.": "q.", "to_k.": "k.", "to_v.": "v.", "to_out.0.": "proj_out."}
OPEN_CLIP = {
    "layer_norm1.": "ln_1.",
    "layer_norm2.": "ln_2.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "self_attn.out_proj.": "attn.out_proj.",
}


def write_original(folder: Path, file: Path) -> Path:
    """Write the whole checkpoint of a diffusers folder, its weights under the original names."""
    pipeline = open_pipeline(folder)
    tensors = _prefixed("model.diffusion_model.", _unet(pipeline.unet))
    tensors |= _prefixed("first_stage_model.", original_vae(pipeline.vae))
    if hasattr(pipeline, "text_encoder_2"):
        tensors |= _prefixed("conditioner.embedders.0.transformer.", _clip(pipeline.text_encoder))
        tensors |= _prefixed("conditioner.embedders.1.model.", _open_clip(pipeline.text_encoder_2))
    elif pipeline.scheduler.config.prediction_type == "v_prediction":
        tensors |= _prefixed("cond_stage_model.model.", _open_clip(pipeline.text_encoder))
    else:
        tensors |= _prefixed("cond_stage_model.transformer.", _clip(pipeline.text_encoder))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def copy_config(folder: Path, into: Path) -> Path:
    """Copy a diffusers folder without its weights."""
    return Path(shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors")))


def _unet(unet: Any) -> Tensors:
    depth: int = unet.config.layers_per_block
    weights: Tensors = unet.state_dict()
    attentive = {match[1] for name in weights if (match := re.match(r"up_blocks\.(\d+)\.attentions", name))}

    def renamed(name: str) -> str:
        if match := re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.*)", name):
            return in_block(*match.groups())
        if match := re.match(r"mid_block\.resnets\.(\d)\.(.*)", name):
            return f"middle_block.{2 * int(match[1])}.{_swap(match[2], RESNET)}"
        if match := re.match(r"mid_block\.attentions\.0\.(.*)", name):
            return f"middle_block.1.{match[1]}"
        return _swap(name, UNET_TOP)

    def in_block(side: str, block: str, kind: str, index: str, rest: str) -> str:
        """Name a layer: either side numbers its layers from its beginning to its end.

        The input side begins with the first convolution and ends in a sampler.
        """
        first = int(block) * (depth + 1) + (side == "down")
        place = f"{'input' if side == 'down' else 'output'}_blocks.{first + int(index)}"
        match kind:
            case "resnets":
                return f"{place}.0.{_swap(rest, RESNET)}"
            case "attentions":
                return f"{place}.1.{rest}"
            case "downsamplers":
                return f"input_blocks.{first + depth}.0.{rest.replace('conv.', 'op.')}"
            case _:
                return f"output_blocks.{first + depth}.{2 if block in attentive else 1}.{rest}"

    return {renamed(name): tensor for name, tensor in weights.items()}


def original_vae(vae: Any) -> Tensors:
    levels = len(vae.config.block_out_channels)

    def renamed(name: str) -> str:
        name = name.replace("conv_norm_out.", "norm_out.").replace("conv_shortcut.", "nin_shortcut.")
        name = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", name)
        name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d)", lambda match: f"up.{levels - 1 - int(match[1])}", name)
        name = re.sub(r"\.resnets\.(\d)", r".block.\1", name).replace("upsamplers.0", "upsample")
        name = re.sub(r"mid_block\.block\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
        if match := re.match(r"(.*)mid_block\.attentions\.0\.(.*)", name):
            return f"{match[1]}mid.attn_1.{_swap(match[2], VAE_ATTENTION)}"
        return name

    def shaped(name: str, tensor: Tensor) -> Tensor:
        """The original's attention is made of 1×1 convolutions."""
        return tensor[:, :, None, None] if ".mid.attn_1." in name and tensor.dim() == 2 else tensor

    return {renamed(name): shaped(renamed(name), tensor) for name, tensor in vae.state_dict().items()}


def _clip(model: Any) -> Tensors:
    return {"text_model." + name.removeprefix("text_model."): tensor for name, tensor in model.state_dict().items()}


def _open_clip(model: Any) -> Tensors:
    weights = {name.removeprefix("text_model."): tensor for name, tensor in model.state_dict().items()}
    layers = _by_layer(weights)
    tensors = {
        "positional_embedding": weights["embeddings.position_embedding.weight"],
        "token_embedding.weight": weights["embeddings.token_embedding.weight"],
        "ln_final.weight": weights["final_layer_norm.weight"],
        "ln_final.bias": weights["final_layer_norm.bias"],
        "text_projection": weights.get("text_projection.weight", torch.eye(model.config.hidden_size)).T,
        "logit_scale": torch.tensor(4.6),
    }
    for index, layer in layers:
        place = f"transformer.resblocks.{index}."
        for part in ("weight", "bias"):
            tensors[f"{place}attn.in_proj_{part}"] = torch.cat([layer[f"self_attn.{p}_proj.{part}"] for p in "qkv"])
        tensors |= {
            place + _swap(name, OPEN_CLIP): tensor
            for name, tensor in layer.items()
            if not re.match(r"self_attn\.[qkv]_proj", name)
        }
    return tensors


def _by_layer(weights: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensors]]:
    index = 0
    while layer := {
        name.removeprefix(f"encoder.layers.{index}."): tensor
        for name, tensor in weights.items()
        if name.startswith(f"encoder.layers.{index}.")
    }:
        yield index, layer
        index += 1


def _swap(name: str, table: Mapping[str, str]) -> str:
    """Replace the first prefix that the table has."""
    found = next((old for old in table if name.startswith(old)), None)
    return name if found is None else table[found] + name.removeprefix(found)


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}
