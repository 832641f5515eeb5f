"""Defines the protocol of a model architecture: encode, schedule, denoise, autoencoder, adapted layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from serve_app.domain.jobs import Unread
from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import Source
from serve_app.engine.lanes import Component
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import Schedule
from serve_app.engine_options import EngineOptions

Pause = Callable[[], None]


def no_pause() -> None: ...


class Placement(NamedTuple):
    """Where a base model's text encoders are, and what its decoder may take. It is settled once, before the load."""

    encoders_on_host: bool = False
    """The text encoders stay in host memory and compute there; what they make of a prompt travels to the device."""
    decoding_bytes: int = 0
    """An image whose decoding would take more is decoded in tiles; 0 stands for any number."""


class LatentRGB(NamedTuple):
    """Draws unfinished latents without the decoder: RGB in -1..1 = latents · `factors` [channels, 3] + `bias` [3]."""

    factors: Tensor
    bias: Tensor

    def pixels(self, latents: Tensor, longest: int) -> np.ndarray:
        """Return latents [channels, height, width] as uint8 [height, width, 3], at most `longest` pixels on a side."""
        stride = max(1, -(-max(latents.shape[1:]) // longest))
        small = latents[:, ::stride, ::stride].permute(1, 2, 0).float().cpu()
        rgb = small @ self.factors + self.bias
        return ((rgb.nan_to_num() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def latent_rgb(vae_class: str, channels: int, *, is_xl: bool) -> LatentRGB | None:
    """Return the map from an autoencoder's latents to RGB; None where none is known."""
    match vae_class, channels, is_xl:
        case "AutoencoderKL", 16, False:
            return _map(_FLUX, (-0.0329, -0.0718, -0.0851))
        case "AutoencoderKLQwenImage", 16, False:
            return _map(_WAN, (-0.1835, -0.0868, -0.336))
        case _, 4, False:
            return _map(_SD)
        case _, 4, True:
            return _map(_SDXL)
        case "AutoencoderTiny", 8, False:
            return _map(_POCKET, (0.1695, -0.0946, -0.0837))
        case _:
            return None


def _map(factors: tuple[tuple[float, ...], ...], bias: tuple[float, ...] = (0.0, 0.0, 0.0)) -> LatentRGB:
    return LatentRGB(torch.tensor(factors), torch.tensor(bias))


# All but the bundled model's are in common use, for example in comfy/latent_formats.py of ComfyUI. The VAE of Flux is
# that of Z-Image too, and Qwen's has the latents of Wan 2.1.
_SD = ((0.3512, 0.2297, 0.3227), (0.325, 0.4974, 0.235), (-0.2829, 0.1762, 0.2721), (-0.212, -0.2616, -0.7177))
_SDXL = ((0.392, 0.4054, 0.4549), (-0.2634, -0.0196, 0.0653), (0.0568, 0.1687, -0.0755), (-0.3112, -0.2359, -0.2076))
_FLUX = (
    (-0.0346, 0.0244, 0.0681), (0.0034, 0.0210, 0.0687), (0.0275, -0.0668, -0.0433), (-0.0174, 0.0160, 0.0617),
    (0.0859, 0.0721, 0.0329), (0.0004, 0.0383, 0.0115), (0.0405, 0.0861, 0.0915), (-0.0236, -0.0185, -0.0259),
    (-0.0245, 0.0250, 0.1180), (0.1008, 0.0755, -0.0421), (-0.0515, 0.0201, 0.0011), (0.0428, -0.0012, -0.0036),
    (0.0817, 0.0765, 0.0749), (-0.1264, -0.0522, -0.1103), (-0.0280, -0.0881, -0.0499), (-0.1262, -0.0982, -0.0778),
)  # fmt: skip
_WAN = (
    (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.142),
    (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
    (-0.0412, 0.0267, -0.1364), (-0.1293, 0.074, 0.1636), (0.068, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
    (-0.1251, 0.0927, 0.1699), (0.006, -0.0633, 0.0005), (0.3477, 0.2275, 0.295), (0.1984, 0.0913, 0.1861),
)  # fmt: skip
_POCKET = (
    (0.5246, 0.0984, -0.0527),
    (0.0806, 0.3915, 0.0258),
    (-0.0826, 0.0217, 0.4626),
    (0.0302, 0.0098, 0.0102),
    (-0.0052, 0.0035, -0.0393),
    (0.0711, -0.022, 0.0612),
    (0.0283, 0.0111, -0.0226),
    (0.0104, 0.0075, 0.0291),
)
"""The bundled model's factors are least squares over 14 finished pictures of 256² and their latents (root mean square
error 0.11)."""


LEAST_TILE = 512
"""Pixels of a tile's side at least: the smaller tiles are, the more a picture differs from one that is decoded whole."""
TILE_STEP = 256
"""Sides of tiles are multiples, so that cards of nearly the same size draw the same images."""


def limit_decoding(vae: Any, decoding_bytes: int) -> None:
    """Let a VAE decode images of a longer side than it has memory for in tiles, which overlap and are blended.

    Which images those are depends on this number alone, so that the bytes of an image do not depend on others. The most
    that decoding holds at once is three tensors of the image's size and as many channels as the second block from the
    end has, as counted on fake tensors.
    """
    if not decoding_bytes:
        return
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    pixels = decoding_bytes // (3 * max(vae.config.block_out_channels[:2]) * vae.dtype.itemsize)
    side = max(math.isqrt(pixels), LEAST_TILE) // TILE_STEP * TILE_STEP
    vae.tile_sample_min_size, vae.tile_latent_min_size = side, side // factor
    vae.enable_tiling()


class Family(Protocol):
    """One loaded base model of some architecture.

    Latents have the shape [channels, …] of unit noise as the reference pipeline draws it. How the denoiser takes them
    (packed into tokens, with positional ids) is the family's own affair, inside `denoise` and its `autoencoder`.
    Rows of a batch never mix: a row's output depends on that row's inputs alone.
    """

    denoiser: str
    """The component that computes every step; the others run once, in `encode`."""
    begins_from_images: bool
    """Whether a run with an image begins from it late in its schedule; otherwise `prepare` takes it in."""

    @classmethod
    def load(cls, source: Source, options: EngineOptions, placement: Placement | None = None) -> Self:
        """Load a base model. Raises OSError, or ValueError on files that are not this family's."""
        ...

    @classmethod
    def meta_components(cls, folder: Path) -> Mapping[str, Component]:
        """Return the components of a base model that a diffusers folder describes, without weights."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def components(self) -> Mapping[str, Component]:
        """Return the components by the names that adapter files use, such as `unet` or `text_encoder`."""
        ...

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Everything that has weights, on the device or in host memory."""
        ...

    @property
    def lanes(self) -> Sequence[Component]:
        """Return the denoiser's component for each pass that may run at the same time, all over the same weights."""
        ...

    @property
    def common_targets(self) -> Sequence[str]:
        """Layers of the denoiser that most adapters change, for which memory is kept."""
        ...

    @property
    def autoencoder(self) -> Autoencoder:
        """Return what turns finished latents into an image, and an image that a run begins from into latents."""
        ...

    @property
    def latent_rgb(self) -> LatentRGB | None:
        """Return how to show latents without the autoencoder; None where no such map is known."""
        ...

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        """Encode a run's prompts into one row, or two (negative first) with guidance.

        The run's adapter is applied to the components already; `adapter_id` is empty where it changes none of them.
        `pause` is called between the pieces of a text that has no limit.
        """
        ...

    def unread(self, request: RunRequest) -> Unread:
        """Return how much of a run's texts is beyond the tokens that this model reads."""
        ...

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Compute once what every pass of a run would compute again.

        The run's adapter is applied to one row of the denoiser. The run begins from an image that is left in it.
        """
        ...

    def schedule(self, request: RunRequest) -> Schedule:
        """Return the run's noise schedule, on the device; with an image it begins late, as the `strength` says.

        Raises ValueError on a sampler that this model cannot use, and on a strength that leaves no step.
        """
        ...

    def latent_shape(self, request: RunRequest) -> tuple[int, ...]:
        """Return the shape [channels, …] of the run's latents; sizes that the model cannot make are rounded up."""
        ...

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        """Compute the denoiser's output in float32, shaped as the latents [rows, channels, …], at timesteps [rows].

        Threads may call it together, each with a lane of its own.
        """
        ...
