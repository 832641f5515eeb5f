"""Writes tiny random weights of FLUX.2 klein's true architecture: transformer, Qwen3 of 27 layers, and a VAE."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_z_image import byte_tokenizer, qwen3

WIDTH = 16
"""Numbers per token of the text encoder."""
BLOCK_LINEARS = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "linear_in",
    "linear_out", "to_qkv_mlp_proj", "attn.to_out",
)  # fmt: skip
"""The linears of the transformer's blocks, by the ends of their names."""


def write_flux2_klein(folder: Path, *, distilled: bool = False, heads: int = 2, blocks: int = 1, seed: int = 0) -> Path:
    """Write a diffusers folder of a base model, or of a distilled one, with this many blocks of each kind."""
    torch.manual_seed(seed)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=32,
        num_layers=blocks,
        num_single_layers=blocks,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=3 * WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    for weight in transformer.parameters():  # larger than by default, so that a caption's words show
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5)
    diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=tiny_vae(),
        text_encoder=transformers.Qwen3ForCausalLM(qwen3(width=WIDTH, inner=16, layers=27, heads=2)),
        tokenizer=byte_tokenizer(),
        transformer=transformer,
        is_distilled=distilled,
    ).save_pretrained(folder)
    return folder


def tiny_vae() -> Any:
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=4,
        sample_size=64,
    )
    torch.nn.init.normal_(vae.bn.running_mean)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return vae


NAMES = {
    "x_embedder.": "img_in.",
    "context_embedder.": "txt_in.",
    "time_guidance_embed.timestep_embedder.linear_1.": "time_in.in_layer.",
    "time_guidance_embed.timestep_embedder.linear_2.": "time_in.out_layer.",
    "_modulation_img.linear.": "_modulation_img.lin.",
    "_modulation_txt.linear.": "_modulation_txt.lin.",
    "single_stream_modulation.linear.": "single_stream_modulation.lin.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
    "proj_out.": "final_layer.linear.",
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
}
DOUBLE = {
    "attn.to_out.0.": "img_attn.proj.",
    "attn.to_add_out.": "txt_attn.proj.",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.linear_in.": "img_mlp.0.",
    "ff.linear_out.": "img_mlp.2.",
    "ff_context.linear_in.": "txt_mlp.0.",
    "ff_context.linear_out.": "txt_mlp.2.",
}
SINGLE = {
    "attn.to_qkv_mlp_proj.": "linear1.",
    "attn.to_out.": "linear2.",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}
QKV = {
    "attn.to_q.": ("attn.to_k.", "attn.to_v.", "img_attn.qkv."),
    "attn.add_q_proj.": ("attn.add_k_proj.", "attn.add_v_proj.", "txt_attn.qkv."),
}


def original_names(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the transformer's weights as the original code names them, queries, keys and values in one."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if any(part in name for keys, values, _ in QKV.values() for part in (keys, values)):
            continue
        for queries, (keys, values, fused) in QKV.items():
            if queries in name:
                tensor = torch.cat([tensor, *(weights[name.replace(queries, part)] for part in (keys, values))])
                name = name.replace(queries, fused)
        if name.startswith("norm_out."):
            tensor = torch.cat(tensor.chunk(2)[::-1])
        for ours, original in {**(SINGLE if name.startswith("single") else DOUBLE), **NAMES}.items():
            name = name.replace(ours, original)
        tensors[prefix + name] = tensor
    return tensors
