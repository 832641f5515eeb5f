"""Defines the protocol of a model architecture: encode, schedule, denoise, decode, adapted layers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from serve_app.engine.families.latent_rgb import LatentRGB
from serve_app.engine.lora_layers import LoRALayer
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import Schedule


class Component(NamedTuple):
    """A module of a base model whose layers adapters can change."""

    module: nn.Module
    layers: Mapping[str, LoRALayer]
    """By the module's own names."""
    aliases: Mapping[str, str]
    """Further names that adapter files give a layer → its own name."""
    kohya_prefixes: Sequence[str]
    """Prefixes of this component's keys in kohya's files, such as `lora_unet`."""


class Family(Protocol):
    """One loaded base model of some architecture.

    Latents have the shape [channels, …] of unit noise as the reference pipeline draws it. How the denoiser takes them
    (packed into tokens, with positional ids) is the family's own affair, inside `denoise` and `decode`.
    Rows of a batch never mix: a row's output depends on that row's inputs alone.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def components(self) -> Mapping[str, Component]:
        """By the names that adapter files use, such as `unet` or `text_encoder`."""
        ...

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Everything that has weights on the device."""
        ...

    @property
    def denoiser(self) -> str:
        """The component that computes every step; the others run once, in `encode`."""
        ...

    @property
    def common_targets(self) -> Sequence[str]:
        """Layers of the denoiser that most adapters change; compiled graphs expect adapters on these."""
        ...

    @property
    def latent_rgb(self) -> LatentRGB | None:
        """How to show latents without `decode`; None where no such map is known."""
        ...

    def encode(self, request: RunRequest, adapter_id: str) -> Conditioning:
        """Encode a run's prompts into one row, or two (negative first) with guidance.

        The run's adapter is applied to the components already; `adapter_id` is empty where it changes none of them.
        """
        ...

    def schedule(self, request: RunRequest) -> Schedule:
        """The run's noise schedule, on the device. Raises ValueError on a sampler that this model cannot use."""
        ...

    def latent_shape(self, request: RunRequest) -> tuple[int, ...]:
        """The shape [channels, …] of the run's latents; sizes that the model cannot make are rounded up."""
        ...

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """Compute the denoiser's output, float32, as the latents [rows, channels, …], at timesteps [rows]."""
        ...

    def decode(self, latents: Tensor, request: RunRequest) -> np.ndarray:
        """Decode one run's latents to uint8 [height, width, 3].

        Raises FloatingPointError where numbers overflow.
        """
        ...
