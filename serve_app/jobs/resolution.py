"""Makes a whole request of a draft by what its LoRAs, their base model and its pictures say, or refuses it."""

import math
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from serve_app.domain.accounts import Caller
from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.domain.errors import Forbidden, InvalidParameter, NotFound
from serve_app.domain.families import LEAST_REFERENCE_SIDE, LONGEST_REFERENCE, Abilities, abilities_of, reference_size
from serve_app.domain.guidance import GuidancePart, SaysPart
from serve_app.domain.jobs import StoredImage
from serve_app.domain.prompt_weights import weighted
from serve_app.domain.requests import (
    MAX_RANDOM_SEED,
    USUAL_GUIDANCE,
    USUAL_STEPS,
    Draft,
    GenerationDraft,
    GenerationRequest,
    Picture,
    Request,
    UpscaleDraft,
    UpscaleRequest,
)
from serve_app.domain.samplers import parse_sampler, passes_of
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.jobs.uploads import Upload, Uploads
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.record import added_cost

SHORTEST_SIDE, SIDE_STEP = 256, 8
MOST_CUT = 0.1
"""An image of another size is drawn from a picture only if at most this part of the picture has to be cut off."""
MAX_OUTPUT_PIXELS = 16_000_000


class Resolved(NamedTuple):
    """A whole request, and how many times its work counts; None is left to what the catalog says at accept."""

    request: Request
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """Reads what the catalog says, and the account's pictures. Every method may raise `StoreUnavailable`."""

    catalog: CatalogReader
    applied_catalog: AppliedCatalog
    uploads: Uploads
    max_rank: int = DEFAULT_MAX_RANK

    async def resolve(self, caller: Caller, draft: Draft) -> Resolved:
        """Return the request of a draft; the service draws a seed that it leaves out.

        Raises `Forbidden` alike for a LoRA that does not exist and one that is not the account's, `NotFound` for an
        image that is not, and `InvalidParameter` for what the base model does not take. A draft of interface A or B
        reads no catalog: its accept asks for the permission, and its LoRA's own sampler draws it.
        """
        if isinstance(draft, UpscaleDraft):
            return Resolved(await self._upscale(caller, draft))
        seed = secrets.randbelow(MAX_RANDOM_SEED) if draft.seed is None else draft.seed
        if draft.interface is not None:
            if not all(caller.may_use(lora.id) for lora in draft.loras):
                raise Forbidden(f"This API key may only be used with {', '.join(sorted(caller.adapters or ()))}.")
            return Resolved(GenerationRequest.made_of(draft, seed))
        return await self._generation(caller, draft, seed)

    async def _generation(self, caller: Caller, draft: GenerationDraft, seed: int) -> Resolved:
        adapters = [await self._adapter(caller, use.id, place) for place, use in enumerate(draft.loras)]
        base = _base_model(draft, adapters, await self.applied_catalog.applied_base_models())
        self._check_loras(draft, adapters)
        begun, masked = [await self._picture(caller, draft, name) for name in ("image_id", "mask_image_id")]
        image, mask = begun and begun.image, masked and masked.image
        abilities = abilities_of(base.pipeline)
        width, height = _size(draft, base, abilities, image)
        _check_abilities(draft, base, abilities)
        if image is not None and not abilities.begins_late:
            _check_reference(image, base)
        sampler = draft.sampler or next((each.sampler for each in adapters if each.sampler), base.sampler)
        steps = next((each.steps for each in (draft, *adapters, base) if each.steps), USUAL_STEPS)
        guidance = next((each.guidance for each in (*adapters, base) if each.guidance), USUAL_GUIDANCE)
        part = _guidance_part(draft, *adapters, base)
        request = GenerationRequest.made_of(
            draft,
            seed,
            base_model=base.id,
            width=width,
            height=height,
            steps=steps,
            guidance_scale=draft.guidance_scale or guidance,
            guidance_start=part and part.start,
            guidance_end=part and part.end,
            sampler=sampler,
            image=image and Picture(image.image_id, image.image_uri),
            mask=mask and Picture(mask.image_id, mask.image_uri),
            from_upload=begun and begun.from_upload,
        )
        cost = _cost(adapters, passes_of(sampler), free=self.max_rank)
        if image is None:
            return Resolved(request, cost)
        if not abilities.begins_late:
            return Resolved(replace(request, strength=1.0), cost * _reference_cost(request, image))
        if abilities.rounds_down and int(request.steps * request.strength) < 1:
            raise InvalidParameter(f"strength: leaves none of {request.steps} steps; must be at least 1 / steps")
        return Resolved(request, cost)

    async def _adapter(self, caller: Caller, lora_id: str, place: int) -> Adapter:
        found = await self.catalog.adapter_of(lora_id, caller.account_id)
        if found is None or not caller.may_use(lora_id):
            raise Forbidden(f"loras[{place}].id: must be a LoRA that you may use")
        return found.adapter

    async def _picture(self, caller: Caller, draft: GenerationDraft, field: str) -> Upload | None:
        image_id: str | None = getattr(draft, field)
        if image_id is None:
            return None
        try:
            return await self.uploads.stored(caller, image_id)
        except NotFound:
            raise NotFound(f"{field}: your account has no such image") from None

    async def _upscale(self, caller: Caller, draft: UpscaleDraft) -> UpscaleRequest:
        found = await self.uploads.stored(caller, draft.image_id, interface=draft.interface)
        request = UpscaleRequest.made_of(
            draft,
            source_uri=found.image.image_uri,
            source_width=found.image.width,
            source_height=found.image.height,
            from_upload=found.from_upload,
        )
        if request.width * request.height > MAX_OUTPUT_PIXELS:
            raise InvalidParameter(
                f"scale_factor: {request.width}x{request.height} is over the limit of 16 megapixels for the output"
            )
        return request

    def _check_loras(self, draft: GenerationDraft, adapters: list[Adapter]) -> None:
        if len({adapter.id for adapter in adapters}) < len(adapters):
            raise InvalidParameter("loras: each may be named once")
        rank = sum(int(adapter.found.get("rank", 0)) for adapter in adapters)
        if len(adapters) > 1 and rank > self.max_rank:
            raise InvalidParameter(f"loras: their ranks must add up to at most {self.max_rank}, not {rank}")
        acting = [
            adapter.found.get("factored") for use, adapter in zip(draft.loras, adapters, strict=True) if use.weight
        ]
        if any(count > 1 for digest, count in Counter(acting).items() if digest):
            raise InvalidParameter(
                "loras: two are LoKrs of whole factors, which cannot be added: use one of them without the other"
            )


def _base_model(draft: GenerationDraft, adapters: list[Adapter], offered: list[BaseModel]) -> BaseModel:
    """Return the base model that a draft names, or else its LoRAs' own, or the first; all LoRAs can be drawn on it."""
    by_id, own = {model.id: model for model in offered}, [*dict.fromkeys(adapter.base_model for adapter in adapters)]
    if gone := [name for name in own if name not in by_id]:
        raise InvalidParameter(f"loras: their base model, {gone[0]}, is not offered any more")
    base = by_id.get(draft.base_model or next(iter((*own, *by_id)), ""))
    if base is None:
        raise InvalidParameter(f"base_model: must be {' or '.join(by_id)}" if by_id else "base_model: none is offered")
    for place, adapter in enumerate(adapters):
        if why := base.why_not_for(by_id[adapter.base_model]):
            raise InvalidParameter(
                f"loras[{place}].id: a LoRA of {adapter.base_model} cannot be drawn on {base.id}: {why}"
            )
    if len(own) > 1 and draft.base_model is None:
        raise InvalidParameter(f"base_model: must be named for LoRAs of several, such as {' or '.join(own)}")
    return base


def _size(draft: GenerationDraft, base: BaseModel, abilities: Abilities, begun: StoredImage | None) -> tuple[int, int]:
    """Return width and height; an image to begin from keeps its proportions where both are not named."""
    longest = base.max_side or abilities.longest_side
    usual = min(abilities.usual_side, longest)
    for name in ("width", "height"):
        if (getattr(draft, name) or 0) > longest:
            raise InvalidParameter(f"{name}: must be at most {longest} with {base.id}")
    if begun is None or (draft.width and draft.height):
        return draft.width or usual, draft.height or usual
    if draft.width or draft.height:
        scale = draft.width / begun.width if draft.width else (draft.height or 0) / begun.height
    else:
        scale = min(usual / math.sqrt(begun.width * begun.height), longest / max(begun.width, begun.height))
    near = (round(side * scale / SIDE_STEP) * SIDE_STEP for side in (begun.width, begun.height))
    width, height = (min(max(side, SHORTEST_SIDE), longest) for side in near)
    width, height = draft.width or width, draft.height or height
    stretched = width * begun.height / (height * begun.width)
    if min(stretched, 1 / stretched) < 1 - MOST_CUT:
        field = "width" if draft.width else "height" if draft.height else "image_id"
        raise InvalidParameter(
            f"{field}: the picture has {begun.width} × {begun.height} pixels, and {base.id} cannot keep its "
            f"proportions with sides of {SHORTEST_SIDE} to {longest}; send width and height, and its middle is taken"
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
    """Return how many times a pass counts that takes an image's tokens besides those of the image that is drawn."""
    _, seen = reference_size(image.width, image.height)
    return 1 + math.prod(seen) / (request.width * request.height)


def _check_abilities(draft: GenerationDraft, base: BaseModel, abilities: Abilities) -> None:
    if draft.prompt_weights and not abilities.prompt_weights:
        raise InvalidParameter(f"prompt_weights: {base.id} does not take them")
    if draft.prompt_weights:
        _check_weights(draft)
    if draft.sampler is not None:
        _check_sampler(draft.sampler, base, abilities)
    for name in ("strength", "mask_image_id"):
        if getattr(draft, name) is not None and not abilities.begins_late:
            raise InvalidParameter(f"{name}: {base.id} looks at an image as a whole and takes none")
        if getattr(draft, name) is not None and draft.image_id is None:
            raise InvalidParameter(f"{name}: needs an image_id")


def _guidance_part(*asked: SaysPart) -> GuidancePart | None:
    try:
        return GuidancePart.said_by(*asked)
    except ValueError as error:
        raise InvalidParameter(str(error)) from None


def _check_weights(draft: GenerationDraft) -> None:
    try:
        for text in (draft.prompt, draft.negative_prompt):
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

    The first one's rank counts as far as it is beyond `free`.
    """
    added = [added_cost(adapter, free=0 if place else free) for place, adapter in enumerate(adapters)]
    return passes * (1 + sum(added))
