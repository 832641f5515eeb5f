"""Makes a whole request of what `POST /v1/jobs` asks for: LoRAs that act together, and what their base model says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

from serve_app.domain.accounts import Caller
from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.domain.errors import Forbidden, InvalidParameter
from serve_app.domain.families import (
    LEAST_REFERENCE_SIDE,
    LONGEST_REFERENCE,
    Abilities,
    abilities_of,
    reference_size,
)
from serve_app.domain.jobs import StoredImage
from serve_app.domain.prompt_weights import weighted
from serve_app.domain.requests import GenerationRequest, ImageFormat, LoraUse, Picture, Priority, image_seeds
from serve_app.domain.samplers import parse_sampler, passes_of
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader, added_cost

USUAL_STEPS, USUAL_GUIDANCE = 30, 7.5
"""What interfaces A and B take, for a base model of which nobody says anything."""
SHORTEST_SIDE, SIDE_STEP = 256, 8
MOST_CUT = 0.1
"""At most this part of a picture is cut off where its proportions cannot be kept altogether."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a caller of `POST /v1/jobs` asks for. None is left to the LoRAs, their base model or the service."""

    prompt: str
    seed: int | None
    num_images: int = 1
    loras: tuple[LoraUse, ...] = ()
    base_model: str | None = None
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    sampler: str | None = None
    prompt_weights: bool = False
    image_id: str | None = None
    strength: float | None = None
    mask_image_id: str | None = None
    output_format: ImageFormat = ImageFormat.PNG
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    priority: Priority = Priority.NORMAL
    start_within: int | None = None

    @classmethod
    def like(cls, request: GenerationRequest) -> Self:
        """Return the wish for the same images."""
        shared = {each.name: getattr(request, each.name) for each in fields(cls) if hasattr(request, each.name)}
        named: dict[str, Any] = {
            "base_model": request.base_model or None,
            "sampler": request.sampler or None,
            "image_id": request.image and request.image.image_id,
            "strength": request.strength if request.image else None,
            "mask_image_id": request.mask and request.mask.image_id,
        }
        return cls(**shared | named)


class Resolved(NamedTuple):
    """A whole request, and how many times its work counts."""

    request: GenerationRequest
    cost: float


@dataclass(frozen=True, slots=True)
class Wishes:
    """Reads what the catalog says. Every method may raise `StoreUnavailable`."""

    catalog: CatalogReader
    applied_catalog: AppliedCatalog
    max_rank: int = DEFAULT_MAX_RANK

    async def resolve(
        self,
        caller: Caller,
        wish: Wish,
        *,
        seed: int,
        image: StoredImage | None = None,
        mask: StoredImage | None = None,
    ) -> Resolved:
        """Return the request of a wish.

        Raises `Forbidden` alike for a LoRA that does not exist and one that is not the account's, and
        `InvalidParameter` for what its base model does not take.
        """
        adapters = [await self._adapter(caller, use.id, place) for place, use in enumerate(wish.loras)]
        base = _base_model(wish, adapters, await self.applied_catalog.applied_base_models())
        self._check_loras(adapters)
        abilities = abilities_of(base.pipeline)
        width, height = _size(wish, base, abilities, image)
        _check_abilities(wish, base, abilities)
        if image is not None and not abilities.begins_late:
            _check_reference(image, base)
        sampler = wish.sampler or next((each.sampler for each in adapters if each.sampler), base.sampler)
        steps = wish.steps or next((each.steps for each in adapters if each.steps), base.steps)
        guidance = wish.guidance_scale or next((each.guidance for each in adapters if each.guidance), base.guidance)
        request = GenerationRequest(
            prompt=wish.prompt,
            negative_prompt=wish.negative_prompt,
            loras=wish.loras,
            base_model=base.id,
            width=width,
            height=height,
            steps=steps or USUAL_STEPS,
            guidance_scale=guidance or USUAL_GUIDANCE,
            sampler=sampler,
            seeds=image_seeds(seed, wish.num_images),
            prompt_weights=wish.prompt_weights,
            image=image and Picture(image.image_id, image.image_uri),
            mask=mask and Picture(mask.image_id, mask.image_uri),
            output_format=wish.output_format,
            metadata=wish.metadata,
            priority=wish.priority,
            start_within=wish.start_within,
        )
        if image is not None:
            request = replace(request, strength=wish.strength or (request.strength if abilities.begins_late else 1.0))
            if abilities.rounds_down and int(request.steps * request.strength) < 1:
                raise InvalidParameter(f"strength: leaves none of {request.steps} steps; must be at least 1 / steps")
        cost = _cost(adapters, passes_of(sampler), free=self.max_rank)
        return Resolved(
            request, cost if image is None or abilities.begins_late else cost * _reference_cost(request, image)
        )

    async def _adapter(self, caller: Caller, lora_id: str, place: int) -> Adapter:
        found = await self.catalog.adapter_of(lora_id, caller.account_id)
        if found is None or not caller.may_use(lora_id):
            raise Forbidden(f"loras[{place}].id: must be a LoRA that you may use")
        return found.adapter

    def _check_loras(self, adapters: list[Adapter]) -> None:
        if len({adapter.id for adapter in adapters}) < len(adapters):
            raise InvalidParameter("loras: each may be named once")
        rank = sum(int(adapter.found.get("rank", 0)) for adapter in adapters)
        if len(adapters) > 1 and rank > self.max_rank:
            raise InvalidParameter(f"loras: their ranks add up to {rank}, and must to at most {self.max_rank}")


def _base_model(wish: Wish, adapters: list[Adapter], offered: list[BaseModel]) -> BaseModel:
    of_loras = dict.fromkeys(adapter.base_model for adapter in adapters)
    if len(of_loras) > 1:
        raise InvalidParameter(f"loras: must be of one base model, and are of {' and '.join(of_loras)}")
    named = next(iter(of_loras), wish.base_model)
    if wish.base_model not in (None, named):
        raise InvalidParameter(f"base_model: must be that of the LoRAs, {named}, or be left out")
    for model in offered:
        if named in (None, model.id):
            return model
    names = " or ".join(model.id for model in offered)
    if adapters:
        raise InvalidParameter(f"loras: their base model, {named}, is not offered any more")
    raise InvalidParameter(f"base_model: must be {names}" if names else "base_model: none is offered")


def _size(wish: Wish, base: BaseModel, abilities: Abilities, begun: StoredImage | None) -> tuple[int, int]:
    """Return width and height; an image to begin from keeps its proportions where both are not named."""
    longest = base.max_side or abilities.longest_side
    usual = min(abilities.usual_side, longest)
    for name in ("width", "height"):
        if (getattr(wish, name) or 0) > longest:
            raise InvalidParameter(f"{name}: must be at most {longest} with {base.id}")
    if begun is None or (wish.width and wish.height):
        return wish.width or usual, wish.height or usual
    if wish.width or wish.height:
        scale = wish.width / begun.width if wish.width else (wish.height or 0) / begun.height
    else:
        scale = min(usual / math.sqrt(begun.width * begun.height), longest / max(begun.width, begun.height))
    near = (round(side * scale / SIDE_STEP) * SIDE_STEP for side in (begun.width, begun.height))
    width, height = (min(max(side, SHORTEST_SIDE), longest) for side in near)
    width, height = wish.width or width, wish.height or height
    stretched = width * begun.height / (height * begun.width)
    if min(stretched, 1 / stretched) < 1 - MOST_CUT:
        field = "width" if wish.width else "height" if wish.height else "image_id"
        raise InvalidParameter(
            f"{field}: the picture has {begun.width} × {begun.height} pixels, and {base.id} draws none of such proportions "
            f"here, since sides are {SHORTEST_SIDE} to {longest}; name width and height, and its middle is taken"
        )
    return width, height


def _check_reference(image: StoredImage, base: BaseModel) -> None:
    short, long = sorted((image.width, image.height))
    if short < LEAST_REFERENCE_SIDE or long > LONGEST_REFERENCE * short:
        raise InvalidParameter(
            f"image_id: {base.id} looks at pictures of at least {LEAST_REFERENCE_SIDE} pixels a side and at most "
            f"{LONGEST_REFERENCE} times as long as wide; this has {image.width} × {image.height}"
        )


def _reference_cost(request: GenerationRequest, image: StoredImage) -> float:
    """Return how many times a pass counts that takes an image's tokens beside those of the image that is drawn."""
    _, seen = reference_size(image.width, image.height)
    return 1 + math.prod(seen) / (request.width * request.height)


def _check_abilities(wish: Wish, base: BaseModel, abilities: Abilities) -> None:
    if wish.prompt_weights and not abilities.prompt_weights:
        raise InvalidParameter(f"prompt_weights: {base.id} does not take them")
    if wish.prompt_weights:
        _check_weights(wish)
    if wish.sampler is not None:
        _check_sampler(wish.sampler, base, abilities)
    for name in ("strength", "mask_image_id"):
        if getattr(wish, name) is not None and not abilities.begins_late:
            raise InvalidParameter(f"{name}: {base.id} looks at an image as a whole and takes none")
        if getattr(wish, name) is not None and wish.image_id is None:
            raise InvalidParameter(f"{name}: needs an image_id")


def _check_weights(wish: Wish) -> None:
    try:
        for text in (wish.prompt, wish.negative_prompt):
            weighted(text)
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def _check_sampler(name: str, base: BaseModel, abilities: Abilities) -> None:
    try:
        sampler, _ = parse_sampler(name)
    except ValueError as error:
        raise InvalidParameter(str(error)) from None
    if sampler not in abilities.samplers:
        raise InvalidParameter(f"sampler: {base.id} takes {' or '.join(abilities.samplers)}")


def _cost(adapters: list[Adapter], passes: int, *, free: int) -> float:
    """Return how many times the work counts: for each pass of a step, and for the ranks of LoRAs beyond the first.

    Of the first, what is beyond `free` counts too.
    """
    added = [added_cost(adapter, free=0 if place else free) for place, adapter in enumerate(adapters)]
    return passes * (1 + sum(added))
