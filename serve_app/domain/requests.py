"""Requests: immutable, already valid, the same for both variants."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from typing import Any, Self

from serve_app.domain.digests import Digests, given_fields

SEED_SPACE = 2**64
"""Image seeds are unsigned 64-bit integers, and every bit counts (`seeded_generator` in `engine/runner.py`)."""


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
    weight: float = 0.75


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that a request begins from or is masked by: its public id, and its file at accept."""

    image_id: str
    uri: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyRequest:
    """What a request of either kind says of its job and its files; only `POST /v1/jobs` asks for it."""

    output_format: ImageFormat = ImageFormat.PNG
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that its caller keeps with it."""
    priority: Priority = Priority.NORMAL
    start_within: int | None = None
    """Its job ends as expired if no worker has started it after this many seconds; None is as long as any job waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest(_AnyRequest):
    """A request for images of a prompt.

    Interfaces A and B name one LoRA; `POST /v1/jobs` names up to four, and fills in what their base model says.
    """

    prompt: str
    loras: tuple[LoraUse, ...] = ()
    """They act together, each on the base model alone, in whatever order they are named."""
    base_model: str = ""
    """The base model of a request without a LoRA; empty means that of its LoRAs."""
    negative_prompt: str = ""
    width: int = 512
    height: int = 512
    guidance_scale: float = 7.5
    steps: int = 30
    sampler: str = ""
    """Empty means that of its first LoRA that has one of its own, or else that of its base model."""
    seeds: tuple[int, ...]
    """An unsigned 64-bit seed for each image, fixed at accept."""
    prompt_weights: bool = False
    """Whether `(red:1.5)` and `[green]` in its prompts weight their words, as A1111 reads them."""
    image: Picture | None = None
    """The image that it begins from, scaled to its size."""
    strength: float = 0.8
    """How much of `image` is redrawn, above 0 and at most 1: it takes that part of the steps."""
    mask: Picture | None = None
    """White where `image` is redrawn, black where it is kept."""

    @classmethod
    def asked(cls, *, seed: int, lora_id: str, lora_weight: float = 0.75, num_images: int = 1, **fields: Any) -> Self:
        """Return the request that the fields of interface A or B ask for: image i takes `seed + i`."""
        return cls(**fields, loras=(LoraUse(lora_id, lora_weight),), seeds=image_seeds(seed, num_images))

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
    def steps_taken(self) -> int:
        """Return the steps of all its images: one that it begins from leaves out a part of them."""
        return self.num_images * (self.steps if self.image is None else max(1, int(self.steps * self.strength)))

    @property
    def work(self) -> float:
        """Return its megapixel-steps, as its caller is told; `jobs/price.py` says what they cost."""
        return self.steps_taken * self.width * self.height / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class UpscaleRequest(_AnyRequest):
    """A larger copy of a stored image. The source's URI and size in pixels are resolved at accept."""

    image_id: str
    scale_factor: int = 2
    source_uri: str
    source_width: int
    source_height: int

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


Request = GenerationRequest | UpscaleRequest


def fingerprint(request: Request, *, seed_is_given: bool) -> Digests:
    """Return the digests of what a caller asked for, with texts trimmed.

    Seeds that the service drew, and what it found of an upscale's source, are no part of it.
    """
    before = repr(request)
    given = {name: value for name, value in given_fields(request).items() if not name.startswith("source_")}
    if isinstance(request, GenerationRequest) and not seed_is_given:
        before = f"{request.num_images} {replace(request, seeds=())}"
        given["seeds"] = request.num_images
    return Digests.of(given, before)


def image_seeds(seed: int, num_images: int) -> tuple[int, ...]:
    """Return each image's seed: image i takes `seed + i`, mapped to 64 bits by `to_seed_space`."""
    return tuple(to_seed_space(seed + i) for i in range(num_images))


def to_seed_space(seed: int) -> int:
    """Map an integer to 64 bits: 0..2^64-1 to itself, any other by SHA-256 of its decimal text."""
    if 0 <= seed < SEED_SPACE:
        return seed
    digits = format(Decimal(seed), "f")  # str(int) refuses more than 4300 digits; Decimal does not
    return int.from_bytes(hashlib.sha256(digits.encode()).digest()[:8])
