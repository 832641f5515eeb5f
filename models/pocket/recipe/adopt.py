"""Makes checkpoints of the published folder, so that training goes on from it where `.work/` is gone."""

import shutil

from diffusers import AutoencoderTiny, UNet2DConditionModel
from transformers import CLIPTextModel

from .autoencoder import LATENT_CHANNELS, Standardiser
from .plan import ROOT, WORK, Plan
from .training import Checkpoint


def adopt_published(plan: Plan) -> None:
    """The autoencoder counts as finished; the text stage and the UNet's first phase begin with the published weights."""
    shutil.copytree(ROOT / "tokenizer", WORK / "tokenizer", dirs_exist_ok=True)
    vae = AutoencoderTiny.from_pretrained(ROOT / "vae")
    Checkpoint("autoencoder").save(
        model=vae.state_dict(), standardiser=Standardiser(LATENT_CHANNELS).state_dict(), step=plan.autoencoder_steps
    )
    unet = UNet2DConditionModel.from_pretrained(ROOT / "unet")
    encoder = CLIPTextModel.from_pretrained(ROOT / "text_encoder")
    Checkpoint("adopted").save(unet=unet.state_dict())
    Checkpoint("text").save(encoder=encoder.state_dict(), pooling=unet.add_embedding.state_dict())
    Checkpoint("unet").path.unlink(missing_ok=True)
