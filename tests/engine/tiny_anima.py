"""Writes tiny random weights of Anima's true architecture: transformer, conditioner, Qwen3, T5's words, Qwen's VAE."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_cosmos
from torch import Tensor

from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_qwen_vae import tiny_qwen_vae
from tests.engine.tiny_z_image import byte_tokenizer, qwen3

WIDTH = 16
"""Numbers per token of the text encoder."""
BLOCK_LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
"""The linears of the transformer's blocks but those of the time, by the ends of their names."""

if not hasattr(transformer_cosmos, "transforms"):  # torchvision, which resizes a mask of zeros there, is not installed
    transformer_cosmos.transforms = SimpleNamespace(  # pyright: ignore
        functional=SimpleNamespace(resize=lambda mask, size, **_: F.interpolate(mask, size)),  # pyright: ignore
        InterpolationMode=SimpleNamespace(NEAREST=None),
    )


def write_anima(folder: Path, *, heads: int = 2, blocks: int = 2, shift: float = 3.0, seed: int = 0) -> Path:
    """Write a diffusers folder, whose index is that of a modular pipeline."""
    torch.manual_seed(seed)
    transformer = diffusers.CosmosTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=16, num_layers=blocks, text_embed_dim=24, adaln_lora_dim=8,
        extra_pos_embed_type=None, rope_scale=(1.0, 4.0, 4.0), mlp_ratio=2.0,
    )  # fmt: skip
    words = t5_tokenizer()
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=WIDTH, target_dim=24, model_dim=32, num_layers=2, num_attention_heads=2, target_vocab_size=len(words)
    )
    for weight in (*transformer.parameters(), *conditioner.parameters()):  # larger, so that a caption's words show
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5)
    pipeline = diffusers.AnimaAutoBlocks().init_pipeline()
    pipeline.update_components(
        transformer=transformer, text_conditioner=conditioner, vae=tiny_qwen_vae(), t5_tokenizer=words,
        text_encoder=transformers.Qwen3Model(qwen3(width=WIDTH, inner=32, layers=2, heads=2)),
        tokenizer=byte_tokenizer(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
    )  # fmt: skip
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def t5_tokenizer() -> Any:
    """Return T5's tokenizer with a token for each printable letter."""
    letters = [("▁", -2.0), *((chr(code), -3.0) for code in range(33, 127))]
    return transformers.T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters], extra_ids=0)


NAMES = {
    "transformer_blocks.": "blocks.",
    "norm1.linear_": "adaln_modulation_self_attn.",
    "norm2.linear_": "adaln_modulation_cross_attn.",
    "norm3.linear_": "adaln_modulation_mlp.",
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_q.": "q_proj.",
    "to_k.": "k_proj.",
    "to_v.": "v_proj.",
    "to_out.0.": "output_proj.",
    "norm_q.": "q_norm.",
    "norm_k.": "k_norm.",
    "ff.net.0.proj.": "mlp.layer1.",
    "ff.net.2.": "mlp.layer2.",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out.": "final_layer.linear.",
    "time_embed.norm.": "t_embedding_norm.",
    "time_embed.t_embedder.": "t_embedder.1.",
    "patch_embed.proj.": "x_embedder.proj.1.",
}


def original_names(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the transformer's weights as the original code names them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for ours, original in NAMES.items():
            name = name.replace(ours, original)
        tensors[prefix + name] = tensor
    return tensors
