"""Registry of model families by the pipeline class in a checkpoint's model_index.json.

Makes a base model's layer table without its weights, in a second and a few megabytes.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.families.checkpoint import Source, diffusers, pipeline_class
from serve_app.engine.families.clip_text import clip_aliases
from serve_app.engine.families.family import Component, Family
from serve_app.engine.families.sgm import sgm_aliases
from serve_app.engine.families.unet import KOHYA_PREFIXES, UNetFamily
from serve_app.engine.lora_layers import wrap_layers
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
        raise ValueError(f"{source}: {name} is not supported; supported pipelines: {', '.join(FAMILIES)}")
    return FAMILIES[name](source, options)


transformers: Any = importlib.import_module("transformers")

_ENCODERS = ("text_encoder", "text_encoder_2")


def load_meta_layers(folder: Path) -> LayerTable:
    """The layer table of a diffusers folder, whose weights are not read: they are of torch's meta device.

    Raises OSError, or ValueError for another family.
    """
    index = _read(folder / "model_index.json")
    if index.get("_class_name") not in FAMILIES:
        raise ValueError(f"{folder}: {index.get('_class_name')} is not supported")
    with torch.device("meta"):
        components = {"unet": _unet(folder)}
        components |= {name: _encoder(folder, name, index[name][1]) for name in _ENCODERS if _has(index, name)}
    return LayerTable(components, "unet")


def _unet(folder: Path) -> Component:
    unet = diffusers.UNet2DConditionModel.from_config(_read(folder / "unet" / "config.json"))
    layers = wrap_layers(unet)
    return Component(unet, layers, sgm_aliases(layers, unet.config.layers_per_block), KOHYA_PREFIXES["unet"])


def _encoder(folder: Path, name: str, class_name: str) -> Component:
    encoder_class = getattr(transformers, class_name)
    encoder = encoder_class(encoder_class.config_class.from_dict(_read(folder / name / "config.json")))
    layers = wrap_layers(encoder)
    return Component(encoder, layers, clip_aliases(layers), KOHYA_PREFIXES[name])


def _has(index: Mapping[str, Any], name: str) -> bool:
    return bool(index.get(name) and index[name][1])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
