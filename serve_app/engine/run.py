"""Holds the data of one image (request, run, result), and what an engine has done, for whoever measures it."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from serve_app.domain.jobs import ALL_READ, Failure, Unread
from serve_app.engine.sampler import Schedule


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter on this machine's disk. `id` is the sha256 (hex) of its bytes and identifies its weights."""

    id: str
    path: Path


@dataclass(frozen=True)
class ComposedAdapter:
    """Several adapters that act as one at scale 1: what each changes in the base alone, times its weight, added.

    `as_one` makes it, with its parts in an order of their own.
    """

    parts: tuple[tuple[AdapterFile, float], ...]

    @cached_property
    def id(self) -> str:
        """Return `id*weight+id*weight`, which identifies the weights of them all."""
        return "+".join(f"{file.id}*{weight!r}" for file, weight in self.parts)


Adapter = AdapterFile | ComposedAdapter


class Applied(NamedTuple):
    """The `adapter` and the `scale` of a run."""

    adapter: Adapter | None
    scale: float


def as_one(files: Iterable[tuple[AdapterFile, float]]) -> Applied:
    """Return what a run names to have all these adapters, each with its weight, in whatever order they come."""
    parts = sorted(((file, float(weight)) for file, weight in files), key=lambda part: (part[0].id, part[1]))
    if len(parts) < 2:
        return Applied(*parts[0]) if parts else Applied(None, 1.0)
    return Applied(ComposedAdapter(tuple(parts)), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """One image to make.

    `run_id` is the caller's, unique among live runs; `seed` is an unsigned 64-bit integer.
    An empty `base_model` means the engine's first; `sampler` None means the base model's own. `as_one` makes the
    `adapter` and `scale` of several LoRAs. With `prompt_weights`, both prompts are read by `domain/prompt_weights.py`.
    Guidance acts between `guidance_start` and `guidance_end`, fractions of the steps that it takes.

    With an `image` (uint8 [height, width, 3], of the run's size) it takes the last `strength` of its steps, from that
    image with noise. `mask` (uint8 [height, width]) is 128 or more where the image is redrawn; the rest is kept. A
    model that looks at images takes one of any size.
    """

    run_id: str
    prompt: str
    negative_prompt: str = ""
    adapter: Adapter | None = None
    scale: float = 0.75
    seed: int = 0
    steps: int = 30
    guidance: float = 7.5
    guidance_start: float = 0.0
    guidance_end: float = 1.0
    width: int = 512
    height: int = 512
    base_model: str = ""
    sampler: str | None = None
    prompt_weights: bool = False
    image: np.ndarray | None = None
    strength: float = 0.8
    mask: np.ndarray | None = None

    @property
    def of_its_image(self) -> "RunRequest":
        """Return the request for an image of the size of the one that it begins from."""
        assert self.image is not None
        height, width = self.image.shape[:2]
        return replace(self, height=height, width=width)


class Finished(NamedTuple):
    """Result of a run: an image (uint8 [height, width, 3]) or a failure; `seconds` since it was added,
    `decode_seconds` since its last step."""

    run_id: str
    image: np.ndarray | None
    failure: Failure | None
    seconds: float
    decode_seconds: float = 0.0
    unread: Unread = ALL_READ


class BatchKey(NamedTuple):
    """Properties that runs must share to be denoised in one forward pass."""

    base_model: str
    latent_shape: tuple[int, ...]
    """Channels first."""
    context_length: int

    @property
    def cells(self) -> int:
        """Latent cells of one row: the unit of compute."""
        return math.prod(self.latent_shape[1:])


class EncodedImage(NamedTuple):
    """What a VAE makes of the image that a run begins from, each [channels, height, width], float32."""

    mean: Tensor
    deviation: Tensor | None
    """The run's own noise times this is added; None where it begins from the mean alone."""
    drawn: Tensor | None
    """1 for cells that are redrawn and 0 for those that are kept, [1, height, width]; None without a mask."""


class Conditioning(NamedTuple):
    """Inputs of the denoiser besides latents and time. A run has one row, or two (negative first) with guidance."""

    context: Tensor
    """[rows, tokens, width] encoder hidden states."""
    added: dict[str, Tensor]
    """Further inputs by name, each [rows, …]."""
    image: EncodedImage | None = None
    """What a run begins from, which is no input of the denoiser."""
    unread: Unread = ALL_READ

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.context, *self.added.values(), *(self.image or ())) if each is not None]

    @property
    def rows(self) -> int:
        return self.context.shape[0]

    def last(self, rows: int) -> "Conditioning":
        """Return the inputs of so many rows, the prompt's last."""
        return Conditioning(self.context[-rows:], {name: tensor[-rows:] for name, tensor in self.added.items()})


class KeptImage(NamedTuple):
    """What a mask keeps of an image, each [channels, …] but for the mask."""

    image: Tensor
    noise: Tensor
    drawn: Tensor
    """1 for cells that are redrawn, [1, …]."""


@dataclass(kw_only=True, eq=False, slots=True)
class Run:
    """A run inside the engine, from its admission to its last step."""

    request: RunRequest
    batch_key: BatchKey
    conditioning: Conditioning
    slot: int
    schedule: Schedule
    guided: range
    """The passes that have guidance, if its conditioning has any."""
    generator: torch.Generator
    state: list[Tensor]
    """Each [channels, …], float32: the latents, and what the sampler remembers of earlier passes."""
    seen: tuple[int, Tensor, Tensor] | None = None
    """The last pass, its input and the denoiser's guided output, each [channels, …]."""
    kept: KeptImage | None = None
    """What a mask keeps, which is put back into the latents after every pass."""
    step: int = 0
    """Passes of the denoiser that are done; some samplers take two for a step of the request."""
    unread: Unread = ALL_READ
    added_at: float = 0.0
    denoised_at: float = 0.0

    @property
    def latents(self) -> Tensor:
        return self.state[0]

    @property
    def rows(self) -> int:
        """Return how many rows its next pass takes; where guidance does not act, it is that of its prompt alone."""
        return self.conditioning.rows if self.step in self.guided else 1

    @property
    def steps_done(self) -> int:
        """Return how many of its schedule's steps are done."""
        return self.step * self.schedule.steps // self.schedule.passes

    @property
    def is_done(self) -> bool:
        return self.step >= self.schedule.passes


MOST_KEPT = 4096
"""How many measurements of each kind are kept while no reporter collects them."""

_Item = TypeVar("_Item")


class StepTiming(NamedTuple):
    """One step of one batch: how long, rows of the forward pass, distinct adapters in it."""

    seconds: float
    rows: int
    adapters: int


class Measured:
    """Steps, loads of adapters and evictions since they were last taken. Any thread adds, and one takes."""

    def __init__(self) -> None:
        self.steps: deque[StepTiming] = deque(maxlen=MOST_KEPT)
        self.loads: deque[float] = deque(maxlen=MOST_KEPT)
        """Seconds that reading and packing each adapter took."""
        self.evictions: deque[str] = deque(maxlen=MOST_KEPT)
        """Adapters that lost their slot."""


def take(items: deque[_Item]) -> Iterator[_Item]:
    """Remove and yield what is there."""
    for _ in range(len(items)):
        yield items.popleft()
