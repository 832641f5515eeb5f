"""The playground's form: which fields it has, and the draft that it makes, by the rules of `POST /v1/jobs`."""

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from serve_app.api.jobs.schemas import GenerationWish
from serve_app.api.routing import validate
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import SEED_SPACE, USUAL_WEIGHT, GenerationDraft, GenerationRequest
from serve_app.domain.samplers import Sampler, SigmaSpacing, parse_sampler
from serve_app.jobs.resolution import SIDE_STEP
from serve_app.web.site import size_text

EXAMPLES = (
    "a yellow flower with a red middle on a blue background",
    "a large red heart in the center on a pink background",
    "a yellow sun over green hills under a blue sky",
)
"""Prompts that the bundled model draws well without a LoRA: looked at over twelve seeds each (28 November 2026)."""
DEFAULTS: Mapping[str, str] = {
    "prompt": "", "negative_prompt": "", "base_model": "", "size": "", "other_size": "", "num_images": "1", "image_id": "",
    "mask_image_id": "", "strength": "0.8", "sampler": "", "spacing": "", "steps": "", "guidance_scale": "",
    "guidance_start": "", "guidance_end": "", "seed": "", "output_format": "png", "prompt_weights": "",
    "embed_settings": "",
}  # fmt: skip
"""The fields as they are in a new form; an empty one is left to the LoRAs, their base model or the service."""
TUNED = (
    "negative_prompt", "base_model", "sampler", "spacing", "steps", "guidance_scale", "guidance_start", "guidance_end",
    "seed", "other_size", "prompt_weights", "embed_settings",
)  # fmt: skip
"""These fields are shown only on demand, unless one of them is filled in."""
COMPARISON: Mapping[str, str] = {
    "lora_weight": str(USUAL_WEIGHT),
    "across": "",
    "weights": "0.25, 0.5, 0.75, 1",
    "seeds": "3",
}
"""The form that compares has these fields in addition to the playground's."""
CHOICE, WEIGHT = "lora:", "weight:"
"""The names of LoRAs' boxes, and of their weights' fields, begin with these and end with the LoRA's id."""
SAMPLERS, SPACINGS, FORMATS = tuple(Sampler), tuple(SigmaSpacing), ("png", "jpeg", "webp")

_TEXTS = ("prompt", "negative_prompt", "base_model", "image_id", "mask_image_id", "sampler", "output_format")
_NUMBERS = ("steps", "guidance_scale", "guidance_start", "guidance_end", "num_images", "seed", "strength")
_LORA_FIELD = re.compile(r"loras\[(\d+)\]\.(\w+)")
_BYTES = re.compile(r"\b(\d+) bytes")
_SIZE = re.compile(r"\s*([0-9]{1,5})\s*[x×*]\s*([0-9]{1,5})\s*")


def draw_seed() -> int:
    """Draw a seed that is short enough to be copied by hand."""
    return secrets.randbelow(2**32)


def chosen_loras(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the weights of the LoRAs that fields choose, in their order; an address may choose one by `lora_id`."""
    usual = fields.get("lora_weight") or str(USUAL_WEIGHT)
    ids = [name.removeprefix(CHOICE) for name in fields if name.startswith(CHOICE)]
    ids += [fields["lora_id"]] if fields.get("lora_id") else []
    return {lora_id: fields.get(f"{WEIGHT}{lora_id}") or usual for lora_id in ids}


def choice_of(loras: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that choose LoRAs with these weights."""
    chosen = {f"{CHOICE}{lora_id}": "yes" for lora_id in loras}
    return chosen | {f"{WEIGHT}{lora_id}": weight for lora_id, weight in loras.items()}


def read_draft(fields: Mapping[str, str], loras: Mapping[str, str]) -> GenerationDraft:
    """Read the draft of a form for these LoRAs and weights; without a seed it takes a short one.

    Raises `InvalidParameter` in words for a person.
    """
    given = {name: text for name, text in fields.items() if text.strip()}
    if "image_id" not in given:  # these are shown with a picture only
        given = {name: text for name, text in given.items() if name not in ("strength", "mask_image_id")}
    if "spacing" in given:
        if "sampler" not in given:
            raise InvalidParameter("noise schedule: choose a sampler for it")
        given["sampler"] += f"-{given['spacing']}"
    body: dict[str, Any] = {"prompt": "", **{name: given[name] for name in _TEXTS if name in given}}
    body |= {name: _number(given[name]) for name in _NUMBERS if name in given} | _sides(
        given.get("other_size") or given.get("size", "")
    )
    body["loras"] = [{"id": lora_id, "weight": _number(weight)} for lora_id, weight in loras.items()]
    if isinstance(body.get("seed"), int) and body["seed"] not in range(SEED_SPACE):  # the API maps it to another one
        raise InvalidParameter(f"seed: must be between 0 and {SEED_SPACE - 1}")
    body |= {name: name in given for name in ("prompt_weights", "embed_settings")}
    try:
        return validate(GenerationWish, {"seed": draw_seed(), **body}).to_domain()
    except InvalidParameter as error:
        raise InvalidParameter(for_people(error.message).replace("_", " ")) from None


def for_people(message: str) -> str:
    """Return a message of the API with its field and sizes in words: `loras[0].weight` as LoRA 1, weight; `64 MB`."""
    message = _BYTES.sub(lambda found: size_text(int(found[1])), message)
    field, colon, rest = message.partition(": ")
    place = _LORA_FIELD.fullmatch(field)
    if place:
        field = f"LoRA {int(place[1]) + 1}{f', {place[2]}' if place[2] != 'id' else ''}"
    elif not field.isidentifier():
        return message
    return f"{field.replace('_', ' ')}: {rest}" if colon else message


def values_of(request: GenerationRequest) -> dict[str, str]:
    """Return the form's fields as they were for a request."""
    draft = GenerationDraft.like(request)
    values = {name: _text(getattr(draft, name)) for name in DEFAULTS if hasattr(draft, name)}
    sampler, spacing = parse_sampler(request.sampler) if request.sampler else ("", None)
    values |= {"sampler": sampler, "spacing": spacing or "", "size": f"{request.width}x{request.height}"}
    if request.image is None:
        values["strength"] = DEFAULTS["strength"]
    return values | choice_of({lora.id: _text(lora.weight) for lora in request.loras})


def sizes(usual: int, longest: int, chosen: str, of_picture: str = "") -> dict[str, str]:
    """Return the sizes that a form offers, with their names: the usual square and larger ones, and the chosen one.

    Beside a picture to begin from the usual one is `of_picture`.
    """
    large = usual * 3 // 2 // SIDE_STEP * SIDE_STEP
    offered = {"": of_picture or f"{usual} × {usual}, square"}
    if large <= longest:
        sides = {"wide": (large, usual), "tall": (usual, large), "large": (large, large)}
        offered |= {f"{width}x{height}": f"{width} × {height}, {name}" for name, (width, height) in sides.items()}
    return offered if chosen in offered else {**offered, chosen: chosen.replace("x", " × ")}


def _sides(size: str) -> dict[str, int]:
    if not size:
        return {}
    sides = _SIZE.fullmatch(size)
    if sides is None:
        raise InvalidParameter("size: must be a width and a height in pixels, as 768x512")
    return {"width": int(sides[1]), "height": int(sides[2])}


def _number(text: str) -> Any:
    """Return the number that a field holds, or its text, which `GenerationWish` refuses by its rule."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
