"""Cuts an image into overlapping tiles and joins their upscaled copies without a seam."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Tile(NamedTuple):
    """A rectangle of the source image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cut(height: int, width: int, *, side: int, overlap: int) -> Iterator[Tile]:
    """Cut tiles of at most `side` that cover the image; neighbours share at least `overlap` pixels."""
    for top in _starts(height, side, overlap):
        for left in _starts(width, side, overlap):
            yield Tile(top, left, min(side, height), min(side, width))


def tile_count(height: int, width: int, *, side: int, overlap: int) -> int:
    return len(_starts(height, side, overlap)) * len(_starts(width, side, overlap))


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
        """The joined image, float32."""
        return self._sum / self._weight

    def _ramp(self, start: int, length: int, whole: int) -> np.ndarray:
        """Return a tile's weights along a side: zero in the margin, then rising; one at the image's border."""
        along = (np.arange(length * self._scale) + 0.5) / self._scale
        before = along if start else np.full_like(along, np.inf)
        after = length - along if start + length < whole else np.full_like(along, np.inf)
        return np.clip((np.minimum(before, after) - self._margin) / self._fade, 0, 1).astype(np.float32)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """Starts of evenly spaced tiles, so that none is much smaller than the others."""
    if length <= side:
        return [0]
    count = -(-(length - overlap) // (side - overlap))
    return [round(i * (length - side) / (count - 1)) for i in range(count)]
