"""Makes checkpoints of the published folder, so that training goes on from it where `.work/` is gone."""

import shutil

from diffusers import AutoencoderTiny, UNet2DConditionModel
from transformers import CLIPTextModel

from .autoencoder import LATENT_CHANNELS, Standardizer
from .export import published_lora
from .plan import ROOT, WORK, Plan
from .styles import STYLES
from .training import Checkpoint
from .upscaler import SCALES, load_upscaler


def adopt_published(plan: Plan) -> None:
    """Start from the published weights.

    The autoencoder counts as finished; text, UNet, LoRAs and upscalers are trained further.
    """
    shutil.copytree(ROOT / "tokenizer", WORK / "tokenizer", dirs_exist_ok=True)
    vae = AutoencoderTiny.from_pretrained(ROOT / "vae")
    Checkpoint("autoencoder").save(
        model=vae.state_dict(), standardizer=Standardizer(LATENT_CHANNELS).state_dict(), step=plan.autoencoder_steps
    )
    unet = UNet2DConditionModel.from_pretrained(ROOT / "unet")
    encoder = CLIPTextModel.from_pretrained(ROOT / "text_encoder")
    Checkpoint("adopted").save(unet=unet.state_dict())
    Checkpoint("text").save(encoder=encoder.state_dict(), pooling=unet.add_embedding.state_dict())
    for scale in SCALES:
        Checkpoint(f"upscaler-x{scale}").save(model=load_upscaler(scale).state_dict(), optimizers=None, step=0)
    for style in STYLES:
        Checkpoint(f"lora-{style}").save(adapter=published_lora(style))
    for stage in ("unet", "agreed"):
        Checkpoint(stage).path.unlink(missing_ok=True)
