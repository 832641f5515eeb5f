"""Writes tiny random weights of FLUX.1's true architecture: transformer, CLIP, T5 and a VAE."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny_models import clip_config, clip_tokenizer, diffusers, tiny_vae, transformers
from tests.engine.tiny_z_image import VAE

CLIP_WIDTH, T5_WIDTH = 32, 24
"""Numbers of a caption's vector, and of each of its tokens."""
BLOCK_LINEARS = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "net.0.proj", "net.2",
    "norm1.linear", "norm1_context.linear", "norm.linear", "proj_mlp", "proj_out",
)  # fmt: skip
"""The linears of the transformer's blocks, by the ends of their names."""


SHAPE = {
    "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": T5_WIDTH, "pooled_projection_dim": CLIP_WIDTH, "guidance_embeds": True,
    "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
"""dev's transformer, made small."""


def write_flux1(
    folder: Path, *, is_told: bool = True, heads: int = 2, blocks: int = 1, in_channels: int = 64, seed: int = 0
) -> Path:
    """Write a diffusers folder of dev, which is told its guidance, or schnell, with so many blocks of each kind."""
    torch.manual_seed(seed)
    transformer = diffusers.FluxTransformer2DModel(
        **SHAPE
        | {"in_channels": in_channels, "num_layers": blocks, "num_single_layers": blocks, "num_attention_heads": heads}
        | {"guidance_embeds": is_told}
    )
    for weight in transformer.parameters():  # larger than by default, so that a caption's words show
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.8 * weight.shape[1] ** -0.5)
    scheduler = {"shift": 3.0, "use_dynamic_shifting": True} if is_told else {"shift": 1.0}
    diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**scheduler),
        vae=tiny_vae(**VAE),
        text_encoder=transformers.CLIPTextModel(clip_config(CLIP_WIDTH)),
        tokenizer=clip_tokenizer(folder / "vocabulary"),
        text_encoder_2=transformers.T5EncoderModel(t5()),
        tokenizer_2=letter_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def t5() -> Any:
    """Return the configuration of a T5 1.1 whose words are letters."""
    return transformers.T5Config(
        vocab_size=48, d_model=T5_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        initializer_factor=1.0,
    )  # fmt: skip


def letter_tokenizer() -> Any:
    """Return T5's tokenizer with a token for each letter, and one for a `z` with the mark of a word's beginning."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁z", -1.0)]
    letters = [(chr(code), -3.0) for code in range(ord("a"), ord("z") + 1)]
    return transformers.T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=512)


NAMES = {
    "x_embedder.": "img_in.",
    "context_embedder.": "txt_in.",
    "time_text_embed.timestep_embedder.linear_1.": "time_in.in_layer.",
    "time_text_embed.timestep_embedder.linear_2.": "time_in.out_layer.",
    "time_text_embed.text_embedder.linear_1.": "vector_in.in_layer.",
    "time_text_embed.text_embedder.linear_2.": "vector_in.out_layer.",
    "time_text_embed.guidance_embedder.linear_1.": "guidance_in.in_layer.",
    "time_text_embed.guidance_embedder.linear_2.": "guidance_in.out_layer.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
}
DOUBLE = {
    "attn.to_q.": "img_attn.qkv.",
    "attn.add_q_proj.": "txt_attn.qkv.",
    "attn.to_out.0.": "img_attn.proj.",
    "attn.to_add_out.": "txt_attn.proj.",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "norm1.linear.": "img_mod.lin.",
    "norm1_context.linear.": "txt_mod.lin.",
    "ff.net.0.proj.": "img_mlp.0.",
    "ff.net.2.": "img_mlp.2.",
    "ff_context.net.0.proj.": "txt_mlp.0.",
    "ff_context.net.2.": "txt_mlp.2.",
}
SINGLE = {
    "attn.to_q.": "linear1.",
    "proj_out.": "linear2.",
    "norm.linear.": "modulation.lin.",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}
JOINED = {
    "transformer_blocks": {"to_q.": ("to_k.", "to_v."), "add_q_proj.": ("add_k_proj.", "add_v_proj.")},
    "single_transformer_blocks": {"attn.to_q.": ("attn.to_k.", "attn.to_v.", "proj_mlp.")},
}
"""Layers whose outputs follow those of another in one layer of the original code."""


def original_names(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the transformer's weights as the original code names them, and joins them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        joined = JOINED.get(name.partition(".")[0], {})
        if any(part in name for parts in joined.values() for part in parts):
            continue
        for first, others in joined.items():
            if first in name:
                tensor = torch.cat([tensor, *(weights[name.replace(first, part)] for part in others)])
        if name.startswith("norm_out."):
            tensor = torch.cat(tensor.chunk(2)[::-1])
        if name.startswith("proj_out."):
            name = f"final_layer.linear.{name.removeprefix('proj_out.')}"
        for ours, original in {**(SINGLE if name.startswith("single") else DOUBLE), **NAMES}.items():
            name = name.replace(ours, original)
        tensors[prefix + name] = tensor
    return tensors
