"""The families' code by the names of their entries in `serve_app/domain/families.py`."""

from collections.abc import Mapping
from pathlib import Path

import torch

from serve_app.domain import families
from serve_app.domain.catalog import FP8
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.families.anima import AnimaFamily
from serve_app.engine.families.checkpoint import Source, as_checkpoint, pipeline_class
from serve_app.engine.families.family import Family, Placement
from serve_app.engine.families.flux1 import Flux1Family
from serve_app.engine.families.flux2_klein import Flux2KleinFamily
from serve_app.engine.families.krea2 import Krea2Family
from serve_app.engine.families.qwen_image21 import QwenImage21Family
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.families.z_image import ZImageFamily
from serve_app.engine.float8 import to_float8
from serve_app.engine_options import EngineOptions

FAMILIES: Mapping[str, type[Family]] = {
    "sd": UNetFamily,
    "sdxl": UNetFamily,
    "flux1": Flux1Family,
    "flux2-klein": Flux2KleinFamily,
    "qwen-image-2.1": QwenImage21Family,
    "z-image": ZImageFamily,
    "krea-2": Krea2Family,
    "anima": AnimaFamily,
}


def load_family(source: Source, options: EngineOptions, placement: Placement | None = None) -> Family:
    """Load a base model with the family of its pipeline class.

    Raises OSError, or ValueError where there is no family, or for a precision that the device does not have.
    """
    if (precision := as_checkpoint(source).precision) not in ("", FP8):
        raise ValueError(f"precision: may be {FP8}, or is left out, not {precision!r}")
    family = _family_of(source).load(source, options, placement)
    if precision:
        to_float8(family.lanes, family.common_targets, options)
    return family


def load_meta_layers(folder: Path) -> LayerTable:
    """Return the layer table of a diffusers folder in a second and a few megabytes, without reading its weights.

    Raises OSError, or ValueError where there is no family.
    """
    family = _family_of(folder)
    with torch.device("meta"):
        return LayerTable(family.meta_components(folder), family.denoiser)


def _family_of(source: Source) -> type[Family]:
    pipeline = pipeline_class(source)
    for name, family in families.FAMILIES.items():
        if pipeline in family.pipelines:
            return FAMILIES[name]
    supported = ", ".join(families.BY_PIPELINE)
    raise ValueError(f"{as_checkpoint(source).path}: {pipeline} is not supported; supported pipelines: {supported}")
