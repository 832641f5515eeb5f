"""Qwen's VAE, which Krea 2, Anima and Qwen-Image draw with, as one of single images.

diffusers computes it as a VAE of videos, and keeps earlier frames in the module between calls: two threads could not use
it at once. Before the first frame lie zeros, so that of each convolution over time only the last slice counts: the same
numbers take a third of the work.
"""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    AutoencoderKLQwenImage,
    QwenImageCausalConv3d,
    QwenImageResample,
)
from torch import Tensor, nn

from serve_app.engine.families.autoencoder import Autoencoder


def of_images(vae: Any) -> Any:
    """Return an `AutoencoderKLQwenImage` as an `AutoencoderKL`, which takes its weights; another VAE stays as it is."""
    if not isinstance(vae, AutoencoderKLQwenImage):
        return vae
    config: Any = vae.config
    blocks = len(config.dim_mult)
    with torch.device("meta"):
        made: Any = AutoencoderKL(
            in_channels=config.input_channels,
            block_out_channels=tuple(config.base_dim * times for times in config.dim_mult),  # pyright: ignore
            down_block_types=("DownEncoderBlock2D",) * blocks,  # pyright: ignore
            up_block_types=("UpDecoderBlock2D",) * blocks,  # pyright: ignore
            latent_channels=config.z_dim,
            latents_mean=config.latents_mean,
            latents_std=config.latents_std,
            norm_num_groups=1,
            scaling_factor=1.0,
        )
    made.encoder, made.decoder = OfOneFrame(vae.encoder), OfOneFrame(vae.decoder)
    made.quant_conv, made.post_quant_conv = (_last_slice(each) for each in (vae.quant_conv, vae.post_quant_conv))
    return made


def normalized(vae: Any, *, sure: bool = False) -> Autoencoder:
    """Return a VAE whose configuration has a mean and a deviation for each channel of its latents."""
    mean, deviation = (
        torch.tensor(each, device=vae.device)[:, None, None]
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    return Autoencoder(vae, deviation=deviation, mean=mean, sure=sure)


class OfOneFrame(nn.Module):
    """An encoder or decoder of videos that takes and gives images [rows, channels, height, width]."""

    def __init__(self, of_video: nn.Module) -> None:
        super().__init__()
        for layer in list(of_video.modules()):
            for name, child in layer.named_children():
                if isinstance(child, QwenImageCausalConv3d):
                    setattr(layer, name, Convolution(child))
            if isinstance(layer, QwenImageResample) and hasattr(layer, "time_conv"):
                del layer.time_conv  # the first frame passes it by
        self.of_video = of_video

    def forward(self, x: Tensor) -> Tensor:
        return self.of_video(x[:, :, None])[:, :, 0]


class Convolution(nn.Module):
    def __init__(self, of_video: nn.Conv3d) -> None:
        super().__init__()
        self.of_image = _last_slice(of_video)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_image(x[:, :, 0])[:, :, None]


def _last_slice(of_video: Any) -> nn.Conv2d:
    weight, (along, _, down, *_) = of_video.weight, of_video._padding  # of F.pad
    outputs, inputs, _, *sides = weight.shape
    made = nn.Conv2d(inputs, outputs, tuple(sides), padding=(down, along), device="meta")  # pyright: ignore
    made.weight = nn.Parameter(weight[:, :, -1].contiguous(), requires_grad=False)
    made.bias = of_video.bias
    return made
