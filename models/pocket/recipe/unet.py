"""The UNet and its training: a curriculum from small latents to large ones, on cached latents."""

from diffusers import UNet2DConditionModel

from .autoencoder import LATENT_CHANNELS
from .text import WIDTH


def build_unet() -> UNet2DConditionModel:
    """Text reaches it twice: by cross attention, and pooled into the time embedding, which learns colours soonest."""
    return UNet2DConditionModel(
        sample_size=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(64, 128, 160),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=(2, 4, 5),
        norm_num_groups=16,
        addition_embed_type="text",
        addition_embed_type_num_heads=4,
    )
