"""Makes Qwen's VAE with few channels, and gives its weights the names of Wan's, under which single files hold them."""

import re
from typing import Any

import torch
from torch import Tensor

from tests.engine.tiny_models import diffusers


def tiny_qwen_vae() -> Any:
    vae = diffusers.AutoencoderKLQwenImage(base_dim=4).eval()
    for weight in vae.parameters():  # larger than by default, so that a picture shows in its latents
        if weight.dim() == 5:
            torch.nn.init.normal_(weight, std=0.5 * weight[0].numel() ** -0.5)
    return vae


_NAMES = {
    r"^quant_conv": "conv1",
    r"^post_quant_conv": "conv2",
    r"coder\.conv_in": "coder.conv1",
    r"coder\.norm_out": "coder.head.0",
    r"coder\.conv_out": "coder.head.2",
    r"mid_block\.resnets\.0": "middle.0",
    r"mid_block\.resnets\.1": "middle.2",
    r"mid_block\.attentions\.0": "middle.1",
    "down_blocks": "downsamples",
    r"(?<=\d\.)norm1": "residual.0",
    r"(?<=\d\.)conv1": "residual.2",
    r"(?<=\d\.)norm2": "residual.3",
    r"(?<=\d\.)conv2": "residual.6",
    r"conv_shortcut": "shortcut",
}


def wan_names(vae: Any) -> dict[str, Tensor]:
    """Return a VAE's weights under Wan's names."""
    made: dict[str, Tensor] = {}
    for name, weight in vae.state_dict().items():
        name = re.sub(
            r"up_blocks\.(\d)\.(?:resnets\.(\d)|upsamplers\.0)",
            lambda match: f"upsamples.{4 * int(match[1]) + int(match[2] or 3)}",
            name,
        )
        for ours, theirs in _NAMES.items():
            name = re.sub(ours, theirs, name)
        made[name] = weight
    return made
