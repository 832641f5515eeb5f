"""Makes checkpoints of the published folder, so that training goes on from it where `.work/` is gone."""

import shutil

from diffusers import AutoencoderTiny, UNet2DConditionModel
from transformers import CLIPTextModel

from .autoencoder import LATENT_CHANNELS, Standardiser
from .plan import ROOT, WORK, Plan
from .training import Checkpoint


def adopt_published(plan: Plan) -> None:
    """Autoencoder and text count as finished; the UNet begins its first phase with the published weights."""
    shutil.copytree(ROOT / "tokenizer", WORK / "tokenizer", dirs_exist_ok=True)
    vae = AutoencoderTiny.from_pretrained(ROOT / "vae")
    Checkpoint("autoencoder").save(
        model=vae.state_dict(), standardiser=Standardiser(LATENT_CHANNELS).state_dict(), step=plan.autoencoder_steps
    )
    unet = UNet2DConditionModel.from_pretrained(ROOT / "unet")
    encoder = CLIPTextModel.from_pretrained(ROOT / "text_encoder")
    Checkpoint("text").save(encoder=encoder.state_dict(), pooling=unet.add_embedding.state_dict())
    average = [parameter.detach().clone() for parameter in (*unet.parameters(), *encoder.parameters())]
    Checkpoint("unet").save(
        unet=unet.state_dict(), text_encoder=encoder.state_dict(), average=average, phase=0, step=0, optimisers=None
    )
