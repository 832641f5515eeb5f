"""Writes tiny random weights of Z-Image's true architecture: transformer, Qwen3, its chat template, and a VAE."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny_models import diffusers, tiny_vae, transformers

WIDTH = 32
"""Numbers per token of the text encoder."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Says what Qwen3's template says to one message of a user."""


def write_z_image(
    folder: Path, *, dim: int = 32, heads: int = 2, layers: int = 2, shift: float | None = 3.0, seed: int = 0
) -> Path:
    """Write a diffusers folder. `shift` is the schedule's as in Z-Image-Turbo; None lets it depend on the size."""
    torch.manual_seed(seed)
    head = dim // heads
    transformer = diffusers.ZImageTransformer2DModel(
        dim=dim,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=WIDTH,
        axes_dims=[head // 4, head // 4, head // 2],
        axes_lens=[1024, 128, 128],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        **({"use_dynamic_shifting": True} if shift is None else {"shift": shift})
    )
    diffusers.ZImagePipeline(
        scheduler=scheduler,
        vae=tiny_vae(**VAE),
        text_encoder=transformers.Qwen3Model(qwen3(width=WIDTH, inner=64, layers=3, heads=4)),
        tokenizer=byte_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


ORIGINAL = {
    "all_x_embedder.2-1.": "x_embedder.",
    "all_final_layer.2-1.": "final_layer.",
    ".attention.to_out.0.": ".attention.out.",
    ".attention.norm_q.": ".attention.q_norm.",
    ".attention.norm_k.": ".attention.k_norm.",
}


def original_names(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the transformer's weights as the original code names them, queries, keys and values in one."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(".to_q.weight"):
            parts = [weights[name.replace("to_q", f"to_{part}")] for part in "qkv"]
            tensors[name.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".to_k." not in name and ".to_v." not in name:
            for ours, original in ORIGINAL.items():
                name = name.replace(ours, original)
            tensors[name] = tensor
    return {prefix + name: tensor for name, tensor in tensors.items()}


VAE = {
    "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False,
    "use_post_quant_conv": False,
}  # fmt: skip


def qwen3(*, width: int, inner: int, layers: int, heads: int) -> Any:
    """Return the configuration of a Qwen3 whose words are bytes, with half as many key heads."""
    return transformers.Qwen3Config(
        vocab_size=256 + len(SPECIAL), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=8, max_position_embeddings=1024,
        initializer_range=0.2,
    )  # fmt: skip


def byte_tokenizer() -> Any:
    """Return Qwen's tokenizer with a token for each byte."""
    letters = sorted(bytes_to_letters().values())
    vocabulary = {token: i for i, token in enumerate([*letters, *SPECIAL])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=1024)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:]), "pad_token": SPECIAL[0]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def bytes_to_letters() -> dict[int, str]:
    """Return the printable letter that GPT-2's byte-level vocabularies write for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
