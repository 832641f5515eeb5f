"""Registers model families by the pipeline class in a checkpoint's model_index.json."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.families.checkpoint import Source, as_checkpoint, pipeline_class
from serve_app.engine.families.family import Component, Family, Placement
from serve_app.engine.families.flux2_klein import Flux2KleinFamily
from serve_app.engine.families.unet import UNetFamily, unet_family_components
from serve_app.engine.families.z_image import ZImageFamily
from serve_app.engine_options import EngineOptions

FAMILIES: dict[str, Callable[[Source, EngineOptions, Placement | None], Family]] = {
    "StableDiffusionPipeline": UNetFamily.load,
    "StableDiffusionXLPipeline": UNetFamily.load,
    "LatentConsistencyModelPipeline": UNetFamily.load,
    "ZImagePipeline": ZImageFamily.load,
    "Flux2KleinPipeline": Flux2KleinFamily.load,
}


def load_family(source: Source, options: EngineOptions, placement: Placement | None = None) -> Family:
    """Load a base model with the family of its pipeline class.

    Raises OSError, or ValueError where there is no family.
    """
    name = pipeline_class(source)
    if name not in FAMILIES:
        path = as_checkpoint(source).path
        raise ValueError(f"{path}: {name} is not supported; supported pipelines: {', '.join(FAMILIES)}")
    return FAMILIES[name](source, options, placement)


LAYERS: dict[str, tuple[str, Callable[[Path], dict[str, Component]]]] = {
    **dict.fromkeys(
        ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "LatentConsistencyModelPipeline"),
        (UNetFamily.denoiser, unet_family_components),
    ),
    "ZImagePipeline": (ZImageFamily.denoiser, ZImageFamily.meta_components),
    "Flux2KleinPipeline": (Flux2KleinFamily.denoiser, Flux2KleinFamily.meta_components),
}
"""Each pipeline class's denoiser, and the function that makes its components from a folder's configurations."""


def load_meta_layers(folder: Path) -> LayerTable:
    """Return the layer table of a diffusers folder in a second and a few megabytes, without reading its weights.

    Raises OSError, or ValueError for another family.
    """
    name = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    if name not in LAYERS:
        raise ValueError(f"{folder}: {name} is not supported")
    denoiser, components = LAYERS[name]
    with torch.device("meta"):
        return LayerTable(components(folder), denoiser)
