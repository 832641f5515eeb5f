"""Z-Image and Z-Image-Turbo: a single-stream diffusion transformer, a Qwen3 text encoder and a VAE."""

from pathlib import Path
from typing import Any

from serve_app.engine.families.checkpoint import make_part
from serve_app.engine.families.family import Component
from serve_app.engine.lora_layers import wrap_layers

_ORIGINAL_NAMES = {
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1": "final_layer",
    "attention.to_out.0": "attention.out",
}
"""Parts of the transformer's layer names as diffusers and as the original code write them."""


def z_image_components(folder: Path) -> dict[str, Component]:
    """Return the components of a base model that a diffusers folder describes, without weights."""
    return {
        "transformer": z_image_component(make_part(folder, "transformer")),
        "text_encoder": qwen_component(make_part(folder, "text_encoder")),
    }


def z_image_component(transformer: Any) -> Component:
    layers = wrap_layers(transformer)
    aliases: dict[str, str] = {}
    for layer in layers:
        for ours, original in _ORIGINAL_NAMES.items():
            if ours in layer:
                aliases[layer.replace(ours, original)] = layer
    return Component(transformer, layers, aliases, ("lora_unet", "lora_transformer"))


def qwen_component(encoder: Any) -> Component:
    """Return the component of a Qwen3 language model without its head, which encodes nothing."""
    encoder = getattr(encoder, "model", encoder)
    layers = wrap_layers(encoder)
    return Component(encoder, layers, {f"model.{layer}": layer for layer in layers}, ("lora_te", "lora_te1"))
