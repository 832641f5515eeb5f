"""Puts the trained UNet, autoencoder and text encoder into the model folder."""

from .autoencoder import trained_autoencoder
from .export import export_pipeline, write_checksums
from .plan import Plan
from .unet import trained_models


def publish(plan: Plan) -> None:
    """Write the pipeline from the checkpoints' averaged weights, then the checksums of all files."""
    unet, text_encoder = trained_models()
    export_pipeline(unet, trained_autoencoder(), text_encoder)
    write_checksums()
