"""One image being made: what was asked, where it stands, and how it ended."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_app.domain.jobs import Failure
from serve_app.engine.sampler import Schedule


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter on this machine's disk. `id` is the sha256 (hex) of its bytes: the identity of its weights."""

    id: str
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """One image to make. `key` is the caller's name for it, unique among live runs; `seed` is unsigned 64-bit.

    `base_model` empty means the engine's first; `sampler` None means the base model's own.
    """

    key: str
    prompt: str
    negative_prompt: str = ""
    adapter: AdapterFile | None = None
    weight: float = 0.75
    seed: int = 0
    steps: int = 30
    guidance: float = 7.5
    width: int = 512
    height: int = 512
    base_model: str = ""
    sampler: str | None = None


class Finished(NamedTuple):
    """How a run ended: an image (uint8 [height, width, 3]) or a failure, never both; `seconds` since it was added."""

    key: str
    image: np.ndarray | None
    failure: Failure | None
    seconds: float


class BatchKey(NamedTuple):
    """What must match for runs to share one forward pass."""

    base_model: str
    latent_height: int
    latent_width: int
    context_length: int

    @property
    def cells(self) -> int:
        return self.latent_height * self.latent_width


class Conditioning(NamedTuple):
    """What the denoiser is told besides latents and time; one row without guidance, two (negative first) with it."""

    context: Tensor
    """[rows, tokens, width] encoder hidden states."""
    added: dict[str, Tensor]
    """Further inputs by the denoiser's own name, each [rows, …]."""

    @property
    def rows(self) -> int:
        return self.context.shape[0]


@dataclass(kw_only=True, eq=False, slots=True)
class Run:
    """A run inside the engine, from its admission to its last step."""

    request: RunRequest
    key: BatchKey
    conditioning: Conditioning
    slot: int
    schedule: Schedule
    generator: torch.Generator
    latents: Tensor
    """[channels, height, width], float32."""
    previous: Tensor
    """The last step's prediction of the finished latents, which second-order samplers look back at."""
    step: int = 0
    added_at: float = field(default=0.0)

    @property
    def rows(self) -> int:
        return self.conditioning.rows

    @property
    def is_done(self) -> bool:
        return self.step >= self.request.steps
