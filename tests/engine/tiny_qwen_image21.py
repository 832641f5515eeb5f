"""Writes tiny random weights of Qwen-Image 2.1's true architecture: transformer, Qwen3-VL with its eyes, and a VAE."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_z_image import SPECIAL, byte_tokenizer

WIDTH, CHANNELS = 32, 8
"""Numbers per token of the text encoder, and channels of the VAE's latents."""
SIGMAS = [1.0, 0.9, 0.6, 0.25]
SHIFTING = {"use_dynamic_shifting": True, "shift_terminal": 0.02, "base_shift": 0.5, "max_shift": 0.9}


class Words:
    """Stands for the processor of the pipeline, which needs torchvision, where there are words alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        ((text,),) = ([part["text"] for part in message["content"]] for message in messages)
        return [self.tokenizer(f"<|im_start|>system\n{text}<|im_end|>\n").input_ids]

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)


def write_qwen_image21(
    folder: Path, *, heads: int = 2, layers: int = 2, causal: bool = True, sigmas: bool = False, seed: int = 0
) -> Path:
    """Write a diffusers folder. `sigmas` lets the model's author say the levels of noise."""
    torch.manual_seed(seed)
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=heads,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
        causal_condition=causal,
    )
    for weight in transformer.parameters():  # larger than by default, so that a caption's words show
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5)
    tokenizer = byte_tokenizer()
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**SHIFTING),
        "vae": tiny_vae(),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration(qwen3_vl()),
        "transformer": transformer,
    }
    pipeline = diffusers.QwenImage21Pipeline(
        **parts, processor=Words(tokenizer), sample_sigmas=SIGMAS if sigmas else None
    )
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "processor")
    pipeline.save_config(folder)
    return folder


def tiny_vae(channels: int = CHANNELS) -> Any:
    generator = torch.Generator().manual_seed(2)
    mean, deviation = torch.randn(channels, generator=generator), torch.rand(channels, generator=generator) + 0.5
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, z_dim=channels, dim_mult=[1, 1, 2, 2, 2], num_res_blocks=1,
        latents_mean=mean.tolist(), latents_std=deviation.tolist(),
    )  # fmt: skip


def qwen3_vl() -> Any:
    """Return the configuration of a Qwen3-VL whose words are bytes, with half as many key heads."""
    places = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 256 + len(SPECIAL), "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
            "rope_parameters": places, "initializer_range": 0.2,
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
    )  # fmt: skip


def original_names(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the transformer's weights as ComfyUI names them, the two halves of the first feed-forward layer in one."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(".gate_layer.weight"):
            tensor = torch.cat([tensor, weights[name.replace("gate_layer", "proj")]])
            tensors[prefix + name.replace("gate_layer", "gate_up")] = tensor
        elif not name.endswith(".img_mlp.proj.weight"):
            tensors[prefix + name] = tensor
    return tensors


_WAN = {
    "quant_conv.": "conv1.", "post_conv1.": "conv2.", "conv_in.": "conv1.", "norm_out.": "head.0.",
    "conv_out.": "head.2.", "mid_block.resnets.0.": "middle.0.", "mid_block.attentions.0.": "middle.1.",
    "mid_block.resnets.1.": "middle.2.", "norm1.": "residual.0.", "norm2.": "residual.3.",
}  # fmt: skip


def wan_names(vae: Any) -> dict[str, Tensor]:
    """Return a VAE's weights under the names of Wan 2.2's code, which convolves over time."""
    return {
        _of_wan(name): each[:, :, None] if each.dim() == 4 and name.endswith(".weight") else each
        for name, each in vae.state_dict().items()
    }


def _of_wan(name: str) -> str:
    block = re.match(r"(en|de)coder\.(down|up)_blocks\.(\d)\.(resnets\.|\w+sampler)(\d?)", name)
    name = re.sub(r"(norm\d\..+|mid_block\.resnets\.\d|resnets\.\d)\.conv1\.", r"\1.residual.2.", name)
    name = re.sub(r"(resnets\.\d)\.conv2\.", r"\1.residual.6.", name)
    for ours, theirs in _WAN.items():
        name = name.replace(ours, theirs)
    if block is None:
        return name
    samples = f"{block[2]}samples"
    name = re.sub(r"(down|up)_blocks\.(\d)\.(resnets\.)", rf"{samples}.\2.{samples}.", name)
    return re.sub(r"(down|up)_blocks\.(\d)\.\w+sampler", rf"{samples}.\2.{samples}.9", name).replace(
        "conv_short", "short"
    )
