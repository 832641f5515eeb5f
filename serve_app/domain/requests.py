"""What callers ask for: a draft, the same for every door, and the whole request that it becomes. Both are immutable."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from enum import StrEnum
from typing import Any, Self

from serve_app.domain.digests import Digests, given_fields, printed_before
from serve_app.domain.guidance import WHOLE, GuidancePart

SEED_SPACE = 2**64
"""Image seeds are unsigned 64-bit integers, and every bit counts (`seeded_generator` in `engine/runner.py`)."""


USUAL_STEPS, USUAL_GUIDANCE, USUAL_WEIGHT = 30, 7.5, 0.75
"""What is drawn where neither the caller nor a LoRA nor its base model says anything."""
MAX_RANDOM_SEED = 2**53
"""Seeds that the service draws are below this, and so exact in every JSON reader."""


class Variant(StrEnum):
    """One public contract: A takes a bearer key, B `X-API-Key`."""

    A = "a"
    B = "b"


class ImageFormat(StrEnum):
    """The file format of stored images."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"

    @classmethod
    def of_name(cls, name: str) -> Self:
        """Return the format that the end of an image's name or URI tells. Raises ValueError for any other."""
        return cls(name.rpartition(".")[2].replace("jpg", cls.JPEG))

    @property
    def suffix(self) -> str:
        """Return how the names of its files end, with the dot."""
        return ".jpg" if self is ImageFormat.JPEG else f".{self}"

    @property
    def media_type(self) -> str:
        return f"image/{self}"


class Priority(StrEnum):
    """How a job waits among those of its account; nobody gets ahead of other accounts."""

    NORMAL = "normal"
    LOW = "low"
    """Behind all others of its account."""


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA of a request, and how strongly it acts. Only `POST /v1/jobs` takes weights below 0."""

    id: str
    weight: float = USUAL_WEIGHT


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that a request begins from or is masked by: its public id, and its file at accept."""

    image_id: str
    uri: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyRequest:
    """What a request of either kind says of its job and its files; interfaces A and B ask for none of it."""

    output_format: ImageFormat = ImageFormat.PNG
    quality: int | None = None
    """How good a JPEG or WebP is, from 0 to 100. Only OpenAI's door asks for it; None means the usual."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that its caller keeps with it."""
    priority: Priority = Priority.NORMAL
    start_within: int | None = None
    """Its job ends as expired if no worker has started it after this many seconds; None is as long as any job waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyGeneration(_AnyRequest):
    """What a draft and the request that it becomes say alike, because no LoRA and no base model has a word on it."""

    prompt: str
    negative_prompt: str = ""
    loras: tuple[LoraUse, ...] = ()
    """They act together, each on the base model alone, in whatever order they are named."""
    prompt_weights: bool = False
    """Whether `(red:1.5)` and `[green]` in its prompts weight their words, as A1111 reads them."""
    embed_settings: bool = False
    """Whether each file holds what it was drawn with, as A1111 and InvokeAI read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDraft(_AnyGeneration):
    """What a caller asks for, by whichever door, until `jobs/resolution.py` makes a request of it.

    None is left to the LoRAs, their base model or the service.
    """

    interface: Variant | None = None
    """The contract by which it was asked for; None stands for all other doors. A's and B's have bounds and defaults of
    their own, so that nothing is left to a base model."""
    seed: int | None
    """Image i takes `seed + i`; the service draws what is None."""
    num_images: int = 1
    base_model: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_start: float | None = None
    guidance_end: float | None = None
    sampler: str | None = None
    image_id: str | None = None
    strength: float | None = None
    mask_image_id: str | None = None

    @classmethod
    def like(cls, request: "GenerationRequest", *, seed: int | None = None) -> Self:
        """Return the draft of the same images, or of those of another seed."""
        named: dict[str, Any] = {
            "seed": request.seed if seed is None else seed,
            "base_model": request.base_model or None,
            "sampler": request.sampler or None,
            "image_id": request.image and request.image.image_id,
            "strength": request.strength if request.image else None,
            "mask_image_id": request.mask and request.mask.image_id,
        }
        return cls(**_told(cls, request) | named)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest(_AnyGeneration):
    """A request for images of a prompt, whole: its record and the worker that draws it have no other.

    A record leaves out what is as its default here, so that no default may change.
    """

    base_model: str = ""
    """Empty means that of its LoRAs."""
    width: int = 512
    height: int = 512
    guidance_scale: float = USUAL_GUIDANCE
    guidance_start: float | None = None
    """The fraction of its own steps at which guidance begins; with it and the next None, its LoRAs or its base model
    may say them."""
    guidance_end: float | None = None
    steps: int = USUAL_STEPS
    sampler: str = ""
    """Empty means that of its first LoRA that has one of its own, or else that of its base model."""
    seeds: tuple[int, ...]
    """An unsigned 64-bit seed for each image, fixed at accept."""
    image: Picture | None = None
    """The image that it begins from, scaled to its size."""
    strength: float = 0.8
    """How much of `image` is redrawn, above 0 and at most 1: it takes that part of the steps."""
    mask: Picture | None = None
    """White where `image` is redrawn, black where it is kept."""
    from_upload: bool | None = None
    """Whether `image` was uploaded, or made from what was; `is_composite` reads it."""

    @classmethod
    def made_of(cls, draft: GenerationDraft, seed: int, **resolved: Any) -> Self:
        """Return the request of a draft: what it names, `resolved`, and the defaults of what neither names."""
        return cls(**_told(cls, draft) | resolved, seeds=image_seeds(seed, draft.num_images))

    @property
    def lora_id(self) -> str:
        """Return its first LoRA's id; empty without one."""
        return self.loras[0].id if self.loras else ""

    @property
    def lora_weight(self) -> float:
        return self.loras[0].weight if self.loras else 0.0

    @property
    def num_images(self) -> int:
        return len(self.seeds)

    @property
    def seed(self) -> int:
        """Return the first image's seed."""
        return self.seeds[0]

    @property
    def own_steps(self) -> int:
        """Return the steps of each image: one that it begins from leaves out a part of them."""
        return self.steps if self.image is None else max(1, int(self.steps * self.strength))

    @property
    def guided_steps(self) -> range:
        """Return which of an image's own steps have guidance, as far as the request says."""
        part = GuidancePart.said_by(self) or WHOLE
        return part.steps(self.own_steps) if self.guidance_scale > 1 else range(0)

    @property
    def work(self) -> float:
        """Return its megapixel-steps, as its caller is told; `jobs/acceptance.py` says what they cost."""
        return self.num_images * self.own_steps * self.width * self.height / 1e6

    @property
    def picture_ids(self) -> tuple[str, ...]:
        """Return the images that are not deleted before its job has ended."""
        return tuple(each.image_id for each in (self.image, self.mask) if each)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyUpscale(_AnyRequest):
    """What the draft of an upscale and the request that it becomes say alike."""

    image_id: str
    scale_factor: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class UpscaleDraft(_AnyUpscale):
    """What a caller who wants a larger copy of an image of the account asks for."""

    interface: Variant | None = None
    """The contract by which it was asked for, which knows images of its own jobs alone; None knows all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpscaleRequest(_AnyUpscale):
    """A larger copy of a stored image. The source's URI and size in pixels are resolved at accept."""

    source_uri: str
    source_width: int
    source_height: int
    from_upload: bool | None = None
    """Whether the image was uploaded, or made from what was; `is_composite` reads it."""

    @classmethod
    def made_of(cls, draft: UpscaleDraft, **source: Any) -> Self:
        """Return the request of a draft, and of what was found of its image."""
        return cls(**_told(cls, draft), **source)

    @property
    def picture_ids(self) -> tuple[str, ...]:
        """Return the images that are not deleted before its job has ended."""
        return (self.image_id,)

    @property
    def num_images(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return self.source_width * self.scale_factor

    @property
    def height(self) -> int:
        return self.source_height * self.scale_factor

    @property
    def work(self) -> float:
        """Return the output's megapixels."""
        return self.width * self.height / 1e6


Draft = GenerationDraft | UpscaleDraft
Request = GenerationRequest | UpscaleRequest


def _told(cls: type[Draft | Request], source: Draft | Request) -> dict[str, Any]:
    """Return the fields of `source` that `cls` has too and that are not None."""
    told = {each.name: getattr(source, each.name, None) for each in fields(cls)}
    return {name: value for name, value in told.items() if value is not None}


def loras_of(asked: Draft | Request) -> tuple[LoraUse, ...]:
    """Return the LoRAs of a generation; an upscale has none."""
    return asked.loras if isinstance(asked, _AnyGeneration) else ()


def is_composite(request: Request) -> bool:
    """Return whether its images are made from somebody's picture too, not by a model alone, which marks say.

    Records of before 28 November 2026 do not tell: each that begins from an image may be one.
    """
    return bool(request.picture_ids) if request.from_upload is None else request.from_upload


def digests_of(draft: Draft, request: Request | None, *, start_within: int | None = None) -> Digests:
    """Return the digests of what a caller asked for, with texts trimmed. An upscale's older one needs its request.

    Seeds that the service drew, and what it found of an upscale's source, are no part of it, and neither is the door's
    own limit `start_within`, which the older text had. A's and B's drafts are digested as the requests that they are,
    without their defaults.
    """
    given = {name: value for name, value in given_fields(draft).items() if name != "interface"}
    name, asked, more = "Wish", replace(draft, start_within=draft.start_within or start_within), ""
    if isinstance(draft, UpscaleDraft):
        name, asked = "UpscaleRequest", request
    elif draft.interface is not None:
        whole = GenerationRequest.made_of(draft, draft.seed or 0)
        given = given_fields(whole) | {"seeds": draft.num_images if draft.seed is None else whole.seeds}
        if draft.seed is None:
            whole, more = replace(whole, seeds=()), f"{draft.num_images} "
        name, asked = "GenerationRequest", whole
    return Digests.of(given, more + printed_before(name, asked) if asked else "")


def image_seeds(seed: int, num_images: int) -> tuple[int, ...]:
    """Return each image's seed: image i takes `seed + i`, mapped to 64 bits by `to_seed_space`."""
    return tuple(to_seed_space(seed + i) for i in range(num_images))


def to_seed_space(seed: int) -> int:
    """Map an integer to 64 bits: 0..2^64-1 to itself, any other by SHA-256 of its decimal text."""
    if 0 <= seed < SEED_SPACE:
        return seed
    digits = format(Decimal(seed), "f")  # str(int) refuses more than 4300 digits; Decimal does not
    return int.from_bytes(hashlib.sha256(digits.encode()).digest()[:8])
