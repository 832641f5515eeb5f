"""Says what base models take, by the pipeline class that their folders name, without importing torch.

The families themselves are in `registry.py`; this is what an interface must know before it accepts a request.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from serve_app.engine_options import Sampler


class Abilities(NamedTuple):
    """What may be asked of a base model. Sides are in pixels, multiples of 8."""

    usual_side: int = 1024
    """Images have this width and height where a request names none."""
    longest_side: int = 1536
    prompt_weights: bool = False
    """Whether `(red:1.5)` in a prompt can weight its words."""
    begins_late: bool = True
    """Whether an image that another is begun from leaves out steps, by its strength, and a mask can keep a part of it.

    Otherwise every step looks at it as a whole.
    """
    rounds_down: bool = False
    """Whether a low strength can leave no step."""
    samplers: Sequence[Sampler] = (Sampler.FLOW_EULER,)
    text: range = range(0, 513)
    """Of each prompt the denoiser reads as many tokens: the longer are cut and the shorter padded."""
    megapixels_per_byte: float = 256 / 1e6
    """A step costs as many megapixels more for each byte of the prompt: of a transformer, a token of the image."""

    def text_bytes(self, prompt: str) -> int:
        """Return by how many bytes encoding a prompt is priced; a token has one at least."""
        return min(max(len(prompt.encode()), self.text.start), self.text.stop - 1)


UNET_SAMPLERS = tuple(sampler for sampler in Sampler if sampler is not Sampler.FLOW_EULER)
_CHUNKS = range(0, 1 << 20)
"""CLIP reads a prompt of any length, chunk by chunk."""
_SDXL = Abilities(
    prompt_weights=True, rounds_down=True, samplers=UNET_SAMPLERS, text=_CHUNKS, megapixels_per_byte=80 / 1e6
)
_UNET = _SDXL._replace(usual_side=512, longest_side=1024)
BY_PIPELINE: Mapping[str, Abilities] = {
    "StableDiffusionPipeline": _UNET,
    "LatentConsistencyModelPipeline": _UNET,
    "StableDiffusionXLPipeline": _SDXL,
    "ZImagePipeline": Abilities(),
    "Flux2KleinPipeline": Abilities(begins_late=False, text=range(512, 513), megapixels_per_byte=0.0),
}
UNKNOWN = _UNET._replace(longest_side=1536, rounds_down=False, samplers=tuple(Sampler))
"""Of a base model whose folder cannot be read here: its engine refuses by name what it does not take."""


REFERENCE_PIXELS, REFERENCE_STEP = 1024 * 1024, 16
"""A picture that a model looks at as a whole is reduced to this many pixels, and cut to multiples of 16 a side."""
LEAST_REFERENCE_SIDE, LONGEST_REFERENCE = 64, 8
"""Its shorter side has at least this many pixels, and its longer one is at most this many times as long; these are the
bounds of diffusers' `Flux2ImageProcessor`."""


def reference_size(width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of such a picture after it is reduced, and of what of its middle is looked at."""
    scale = min(1.0, math.sqrt(REFERENCE_PIXELS / (width * height)))
    reduced = int(width * scale), int(height * scale)
    across, down = (max(REFERENCE_STEP, side // REFERENCE_STEP * REFERENCE_STEP) for side in reduced)
    return reduced, (across, down)


def abilities_of(pipeline: str) -> Abilities:
    """Return the abilities of a pipeline class of diffusers; '' is unknown."""
    return BY_PIPELINE.get(pipeline, Abilities()) if pipeline else UNKNOWN


def pipeline_of(folder: Path) -> str:
    """Return the pipeline class that a diffusers folder names; '' where it cannot be read."""
    try:
        return str(json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name", ""))
    except (OSError, ValueError, AttributeError):
        return ""
