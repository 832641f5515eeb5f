"""Registers model families by the pipeline class in a checkpoint's model_index.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.families.checkpoint import Source, as_checkpoint, diffusers, pipeline_class, transformers
from serve_app.engine.families.family import Component, Family
from serve_app.engine.families.unet import UNetFamily, encoder_component, unet_component
from serve_app.engine_options import EngineOptions

FAMILIES: dict[str, Callable[[Source, EngineOptions], Family]] = {
    "StableDiffusionPipeline": UNetFamily.load,
    "StableDiffusionXLPipeline": UNetFamily.load,
    "LatentConsistencyModelPipeline": UNetFamily.load,
}


def load_family(source: Source, options: EngineOptions) -> Family:
    """Load a base model with the family of its pipeline class.

    Raises OSError, or ValueError where there is no family.
    """
    name = pipeline_class(source)
    if name not in FAMILIES:
        path = as_checkpoint(source).path
        raise ValueError(f"{path}: {name} is not supported; supported pipelines: {', '.join(FAMILIES)}")
    return FAMILIES[name](source, options)


_ENCODERS = ("text_encoder", "text_encoder_2")


def load_meta_layers(folder: Path) -> LayerTable:
    """Return the layer table of a diffusers folder in a second and a few megabytes, without reading its weights.

    Raises OSError, or ValueError for another family.
    """
    index = _read(folder / "model_index.json")
    if index.get("_class_name") not in FAMILIES:
        raise ValueError(f"{folder}: {index.get('_class_name')} is not supported")
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(_read(folder / "unet" / "config.json"))
        components = {"unet": unet_component(unet)}
        components |= {name: _encoder(folder, name, index[name][1]) for name in _ENCODERS if _has(index, name)}
    return LayerTable(components, "unet")


def _encoder(folder: Path, name: str, class_name: str) -> Component:
    encoder_class = getattr(transformers, class_name)
    config = encoder_class.config_class.from_dict(_read(folder / name / "config.json"))
    return encoder_component(name, encoder_class(config))


def _has(index: Mapping[str, Any], name: str) -> bool:
    return bool(index.get(name) and index[name][1])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
