"""Says what base models take, by the pipeline class that their folders name, without importing torch.

The families themselves are in `registry.py`; this is what an interface must know before it accepts a request.
"""

import json
from pathlib import Path
from typing import NamedTuple


class Abilities(NamedTuple):
    """What may be asked of a base model. Sides are in pixels, multiples of 8."""

    usual_side: int = 1024
    """Images have this width and height where a request names none."""
    longest_side: int = 1536
    prompt_weights: bool = False
    """Whether `(red:1.5)` in a prompt can weight its words."""
    mask: bool = True
    """Whether a mask can keep a part of an image that another is begun from."""


_UNET = Abilities(usual_side=512, longest_side=1024, prompt_weights=True)
_BY_PIPELINE = {
    "StableDiffusionPipeline": _UNET,
    "LatentConsistencyModelPipeline": _UNET,
    "StableDiffusionXLPipeline": Abilities(prompt_weights=True),
    "Flux2KleinPipeline": Abilities(mask=False),
}
UNKNOWN = Abilities(usual_side=512, prompt_weights=True)
"""Of a base model whose folder cannot be read here: its engine refuses by name what it does not take."""


def abilities_of(pipeline: str) -> Abilities:
    """Return the abilities of a pipeline class of diffusers; '' is unknown."""
    return _BY_PIPELINE.get(pipeline, Abilities()) if pipeline else UNKNOWN


def pipeline_of(folder: Path) -> str:
    """Return the pipeline class that a diffusers folder names; '' where it cannot be read."""
    try:
        return str(json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name", ""))
    except (OSError, ValueError, AttributeError):
        return ""
