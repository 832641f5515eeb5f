"""Requests: immutable, already valid, the same for both variants."""

import hashlib
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum
from typing import Any, Self

SEED_SPACE = 2**64
"""Image seeds are unsigned 64-bit integers, and every bit counts (`seeded_generator` in `engine/runner.py`)."""


class Variant(StrEnum):
    """One public contract: A takes a bearer key, B `X-API-Key`."""

    A = "a"
    B = "b"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A request for images of a prompt with one LoRA adapter.

    `seeds`: an unsigned 64-bit seed per image, fixed at accept.
    """

    prompt: str
    lora_id: str
    negative_prompt: str = ""
    lora_weight: float = 0.75
    width: int = 512
    height: int = 512
    guidance_scale: float = 7.5
    steps: int = 30
    seeds: tuple[int, ...]

    @classmethod
    def asked(cls, *, seed: int, num_images: int = 1, **fields: Any) -> Self:
        """Return the request that the fields of an interface ask for: image i takes `seed + i`."""
        return cls(**fields, seeds=image_seeds(seed, num_images))

    @property
    def num_images(self) -> int:
        return len(self.seeds)

    @property
    def seed(self) -> int:
        """Return the first image's seed."""
        return self.seeds[0]

    @property
    def work(self) -> float:
        """Return megapixel-steps of denoising, the unit of cost, fairness and time estimates.

        They count twice where the base model's sampler makes two passes a step, which is known at accept.
        """
        return self.num_images * self.steps * self.width * self.height / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class UpscaleRequest:
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


def fingerprint(request: Request, *, seed_is_given: bool) -> str:
    """Return the SHA-256 (hex) of what a caller asked for, with defaults filled in and texts trimmed.

    A seed that the service drew is no part of it.
    """
    asked = repr(request)
    if isinstance(request, GenerationRequest) and not seed_is_given:
        asked = f"{request.num_images} {replace(request, seeds=())}"
    return hashlib.sha256(asked.encode()).hexdigest()


def image_seeds(seed: int, num_images: int) -> tuple[int, ...]:
    """Return each image's seed: image i takes `seed + i`, mapped to 64 bits by `to_seed_space`."""
    return tuple(to_seed_space(seed + i) for i in range(num_images))


def to_seed_space(seed: int) -> int:
    """Map an integer to 64 bits: 0..2^64-1 to itself, any other by SHA-256 of its decimal text."""
    if 0 <= seed < SEED_SPACE:
        return seed
    digits = format(Decimal(seed), "f")  # str(int) refuses more than 4300 digits; Decimal does not
    return int.from_bytes(hashlib.sha256(digits.encode()).digest()[:8])
