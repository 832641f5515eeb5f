"""Writes tiny random weights of Krea 2's true architecture: transformer, Qwen3-VL of six layers, and Qwen's VAE."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.families.krea2 import AFTER, BEFORE
from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_qwen_vae import tiny_qwen_vae
from tests.engine.tiny_z_image import SPECIAL, byte_tokenizer

WIDTH = 16
"""Numbers per token of the text encoder."""
TEXT_LAYERS = (2, 3, 5)
"""The layers of the text encoder that the transformer reads."""
BLOCK_LINEARS = ("to_q", "to_k", "to_v", "to_gate", "to_out.0", "ff.gate", "ff.up", "ff.down")
"""The linears of the transformer's blocks, by the ends of their names."""


def write_krea2(folder: Path, *, distilled: bool = False, heads: int = 4, blocks: int = 2, seed: int = 0) -> Path:
    """Write a diffusers folder of Raw, or of a distilled model, with half as many heads of keys as of queries."""
    torch.manual_seed(seed)
    transformer = diffusers.Krea2Transformer2DModel(
        num_layers=blocks,
        attention_head_dim=16,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=48,
        timestep_embed_dim=32,
        text_hidden_dim=WIDTH,
        num_text_layers=len(TEXT_LAYERS),
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=24,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    for weight in transformer.parameters():  # larger than by default, so that a caption's words show
        torch.nn.init.normal_(weight, std=0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5)
    diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
        ),
        vae=tiny_qwen_vae(),
        text_encoder=transformers.Qwen3VLModel(qwen3_vl()),
        tokenizer=tokenizer(),
        transformer=transformer,
        text_encoder_select_layers=TEXT_LAYERS,
        is_distilled=distilled,
    ).save_pretrained(folder)
    return folder


def qwen3_vl(layers: int = 6) -> Any:
    text = {
        "vocab_size": len(tokenizer()), "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 1024,
        "initializer_range": 0.2, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": WIDTH,
              "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}  # fmt: skip
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, initializer_range=0.2)


def tokenizer() -> Any:
    """Return a tokenizer of bytes for which the template's words are one token each, as they are for Qwen's."""
    made = byte_tokenizer()
    made.add_tokens(_template_words())
    return made


def _template_words() -> list[str]:
    text = BEFORE + AFTER
    for special in SPECIAL:
        text = text.replace(special, "\n")
    words: list[str] = []
    for line in text.split("\n"):
        for i, word in enumerate(line.split(" ")):
            bare = word.rstrip(",:")
            words += [f" {bare}" if i else bare]
    return sorted(set(filter(str.strip, words)))


NAMES = {
    "img_in.": "first.",
    "time_embed.linear_1.": "tmlp.0.",
    "time_embed.linear_2.": "tmlp.2.",
    "time_mod_proj.": "tproj.1.",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.linear_1.": "txtmlp.1.",
    "txt_in.linear_2.": "txtmlp.3.",
    "text_fusion.": "txtfusion.",
    "transformer_blocks.": "blocks.",
    "final_layer.linear.": "last.linear.",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
    "attn.to_q.": "attn.wq.",
    "attn.to_k.": "attn.wk.",
    "attn.to_v.": "attn.wv.",
    "attn.to_out.0.": "attn.wo.",
    "attn.to_gate.": "attn.gate.",
    "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
    "attn.norm_k.weight": "attn.qknorm.knorm.scale",
    "ff.": "mlp.",
    "norm1.weight": "prenorm.scale",
    "norm2.weight": "postnorm.scale",
    "scale_shift_table": "mod.lin",
}


def original_names(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the transformer's weights as the original code names them, a block's table in one row."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith("transformer_blocks.") and name.endswith("scale_shift_table"):
            tensor = tensor.flatten()
        for ours, original in NAMES.items():
            name = name.replace(ours, original)
        tensors[prefix + name] = tensor
    return tensors
