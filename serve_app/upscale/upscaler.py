"""Upscales an image two or four times, by Real-ESRGAN's compact network or, without it, Lanczos.

The network is SRVGGNetCompact (Wang et al. 2021, Real-ESRGAN `realesr-general-x4v3` and kin): same-size convolutions,
then a pixel shuffle onto the enlarged input. Its width, depth and scale are read from the weights. Images are cut into
overlapping tiles, whose upscaled copies are joined without a seam.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn


class Tile(NamedTuple):
    """A rectangle of the source image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cut(height: int, width: int, *, side: int, overlap: int) -> Iterator[Tile]:
    """Cut tiles of at most `side` that cover the image; neighbors share at least `overlap` pixels."""
    for top in _starts(height, side, overlap):
        for left in _starts(width, side, overlap):
            yield Tile(top, left, min(side, height), min(side, width))


class Canvas:
    """Joins upscaled tiles; where they overlap, one fades into the other.

    A tile's outermost third of the overlap is left out: there the network lacks the pixels beyond the cut.
    """

    def __init__(self, height: int, width: int, scale: int, overlap: int) -> None:
        self._height, self._width, self._scale = height, width, scale
        self._margin = overlap // 3
        self._fade = max(1, overlap - 2 * self._margin)
        self._sum = np.zeros((height * scale, width * scale, 3), np.float32)
        self._weight = np.zeros((height * scale, width * scale, 1), np.float32)

    def paste(self, tile: Tile, pixels: np.ndarray) -> None:
        """`pixels`: float32 [tile height · scale, tile width · scale, 3]."""
        s = self._scale
        rows = slice(tile.top * s, (tile.top + tile.height) * s)
        columns = slice(tile.left * s, (tile.left + tile.width) * s)
        down, across = self._ramp(tile.top, tile.height, self._height), self._ramp(tile.left, tile.width, self._width)
        ramp = down[:, None, None] * across[None, :, None]
        self._sum[rows, columns] += pixels * ramp
        self._weight[rows, columns] += ramp

    def finish(self) -> np.ndarray:
        """Return the joined image, float32."""
        return self._sum / self._weight

    def _ramp(self, start: int, length: int, whole: int) -> np.ndarray:
        """Return a tile's weights along a side: zero in the margin, then rising; one at the image's border."""
        along = (np.arange(length * self._scale) + 0.5) / self._scale
        before = along if start else np.full_like(along, np.inf)
        after = length - along if start + length < whole else np.full_like(along, np.inf)
        return np.clip((np.minimum(before, after) - self._margin) / self._fade, 0, 1).astype(np.float32)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """Return starts of evenly spaced tiles, so that none is much smaller than the others."""
    if length <= side:
        return [0]
    count = -(-(length - overlap) // (side - overlap))
    return [round(i * (length - side) / (count - 1)) for i in range(count)]


TILE_SIDE = 256
"""A tile has this many pixels of the source to a side, which bounds memory whatever the image's size."""
OVERLAP = 24
"""Two tiles share this many source pixels; a pixel of the compact network sees at most one a layer to each side."""


class Upscaler:
    """Upscales RGB images. It is not thread-safe; the same image gives the same bytes on the same machine."""

    def __init__(self, networks: "Iterable[CompactNetwork]", device: torch.device) -> None:
        self.networks = {network.scale: network.to(device).eval() for network in networks}
        self.device = device
        self.weight_bytes = sum(weight.nbytes for network in self.networks.values() for weight in network.parameters())

    @classmethod
    def load(cls, folder: Path | None, *, device: str = "cpu") -> "Upscaler":
        """Load the safetensors weights in `folder`, one file per scale; None means Lanczos.

        Raises FileNotFoundError when the folder holds none, ValueError when they are not of the compact network.
        """
        if folder is None:
            return cls([], torch.device(device))
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder}: no upscaler weights (*.safetensors)")
        return cls((CompactNetwork.from_weights(load_file(file)) for file in files), torch.device(device))

    @torch.inference_mode()
    def upscale(
        self, rgb: np.ndarray, factor: int, on_progress: Callable[[int, int], None] | None = None
    ) -> np.ndarray:
        """Upscale uint8 [height, width, 3] by `factor`. `on_progress(done, total)` counts tiles.

        A factor without weights of its own is computed at the nearest larger scale (else the largest), then by Lanczos.
        """
        height, width, _ = rgb.shape
        size = (width * factor, height * factor)
        if not self.networks:
            return _lanczos(rgb, size)
        network = self.networks[min((s for s in self.networks if s >= factor), default=max(self.networks))]
        tiles = list(cut(height, width, side=TILE_SIDE, overlap=OVERLAP))
        canvas = Canvas(height, width, network.scale, OVERLAP)
        for done, tile in enumerate(tiles, 1):
            canvas.paste(tile, self._upscale_tile(network, rgb, tile))
            if on_progress is not None:
                on_progress(done, len(tiles))
        upscaled = (canvas.finish() * 255).round().clip(0, 255).astype(np.uint8)
        return upscaled if network.scale == factor else _lanczos(upscaled, size)

    def _upscale_tile(self, network: "CompactNetwork", rgb: np.ndarray, tile: Tile) -> np.ndarray:
        part = rgb[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
        pixels = torch.from_numpy(np.ascontiguousarray(part)).to(self.device).permute(2, 0, 1)[None].float() / 255
        return network(pixels)[0].permute(1, 2, 0).cpu().numpy()


class CompactNetwork(nn.Module):
    """SRVGGNetCompact with PReLU; its layers have the names of the published weights (`body.0.weight`, …)."""

    def __init__(self, width: int, depth: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.PReLU(width)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width)]
        self.body = nn.Sequential(*layers, nn.Conv2d(width, 3 * scale * scale, 3, padding=1))

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> "CompactNetwork":
        """Build the network that the weights are of. Raises ValueError when they are of another kind."""
        weights = {name.removeprefix("params.").removeprefix("params_ema."): tensor for name, tensor in weights.items()}
        convolutions = sorted(
            (name for name, tensor in weights.items() if name.startswith("body.") and tensor.dim() == 4),
            key=lambda name: int(name.split(".")[1]),
        )
        if len(convolutions) < 2:
            raise ValueError("upscaler weights: no `body.N.weight` convolutions of the compact network")
        out = weights[convolutions[-1]].shape[0]
        network = cls(weights[convolutions[0]].shape[0], len(convolutions) - 2, round((out / 3) ** 0.5))
        try:
            network.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise ValueError(f"upscaler weights: not of the compact network: {error}") from error
        return network

    def forward(self, x: Tensor) -> Tensor:
        """Upscale float32 [1, 3, height, width] in 0..1 by `scale`."""
        shuffled = F.pixel_shuffle(self.body(x), self.scale)
        return shuffled + F.interpolate(x, scale_factor=self.scale, mode="nearest")


def _lanczos(rgb: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS))
