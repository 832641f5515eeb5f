"""Prices jobs at accept: fairness, estimates and scaling count what a worker does for them, texts included.

The unit is a megapixel-step with guidance, which takes two rows of a forward pass; one row is half of it. Who accepts a
job has no tokenizer, and a token is at least one byte of UTF-8, so that texts are priced by their bytes: digits and rare
letters cost what they take, and English, of which a token is about four, costs less than its price.
docs/contribute/decisions/scaling.md has the measurements.
"""

from collections.abc import Mapping

from serve_app.domain.durations import MILLI
from serve_app.domain.families import BY_PIPELINE, UNKNOWN, Abilities
from serve_app.domain.prompt_weights import MOST_LOWERED
from serve_app.domain.requests import GenerationRequest

ENCODED_BYTE = 0.0003
"""Encoding a byte of a prompt once costs as many units, with every family."""
CHUNK = 75
"""Tokens of a chunk, which CLIP encodes once more for each part of it that weighs less than 1."""


def prices(request: GenerationRequest) -> Mapping[str, tuple[int, int]]:
    """Return what a generation costs in thousandths of a unit, by the pipeline class of its base model.

    '' stands for any other class. The first number counts for each pass of a step, the second once.
    """
    return {name: _price(request, abilities) for name, abilities in {**BY_PIPELINE, "": UNKNOWN}.items()}


def _price(request: GenerationRequest, abilities: Abilities) -> tuple[int, int]:
    prompts = [request.prompt, request.negative_prompt] if request.guidance_scale > 1 else [request.prompt]
    lengths = [abilities.text_bytes(prompt) for prompt in prompts]
    per_step = request.width * request.height / 1e6 + max(lengths) * abilities.megapixels_per_byte
    denoising = request.steps_taken * per_step * len(prompts) / 2
    encoded = sum(lengths)
    if request.prompt_weights:
        encoded += sum(map(_bytes_read_again, prompts))
    return max(1, round(denoising * MILLI)), round(encoded * ENCODED_BYTE * MILLI)


def _bytes_read_again(prompt: str) -> int:
    """Return the most bytes that may be encoded again with some of them hidden, by the number of brackets."""
    brackets = prompt.count("(") + prompt.count("[")
    return brackets and len(prompt.encode()) + min(brackets, MOST_LOWERED) * CHUNK
