"""Cuts a picture into overlapping tiles and joins their enlarged copies without a seam."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Tile(NamedTuple):
    """A rectangle of the source, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cut(height: int, width: int, *, side: int, overlap: int) -> Iterator[Tile]:
    """Tiles of at most `side` that cover the picture, neighbours sharing at least `overlap` pixels."""
    for top in _starts(height, side, overlap):
        for left in _starts(width, side, overlap):
            yield Tile(top, left, min(side, height), min(side, width))


def tile_count(height: int, width: int, *, side: int, overlap: int) -> int:
    return len(_starts(height, side, overlap)) * len(_starts(width, side, overlap))


class Canvas:
    """Collects enlarged tiles; where they overlap, each counts by its distance to its own border."""

    def __init__(self, height: int, width: int, scale: int, overlap: int) -> None:
        self._scale = scale
        self._overlap = overlap
        self._sum = np.zeros((height * scale, width * scale, 3), np.float32)
        self._weight = np.zeros((height * scale, width * scale, 1), np.float32)

    def paste(self, tile: Tile, pixels: np.ndarray) -> None:
        """`pixels`: float32 [tile height · scale, tile width · scale, 3]."""
        s = self._scale
        rows = slice(tile.top * s, (tile.top + tile.height) * s)
        columns = slice(tile.left * s, (tile.left + tile.width) * s)
        ramp = self._ramp(tile.height * s)[:, None, None] * self._ramp(tile.width * s)[None, :, None]
        self._sum[rows, columns] += pixels * ramp
        self._weight[rows, columns] += ramp

    def finish(self) -> np.ndarray:
        """The joined picture, float32."""
        return self._sum / self._weight

    def _ramp(self, length: int) -> np.ndarray:
        """Rises from the border over the overlap, never to zero: a border of the picture has only this tile."""
        from_border = np.minimum(np.arange(length), np.arange(length)[::-1]) + 1.0
        return np.minimum(from_border / max(1, self._overlap * self._scale), 1.0).astype(np.float32)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """Evenly spaced, so that no tile is a sliver."""
    if length <= side:
        return [0]
    count = -(-(length - overlap) // (side - overlap))
    return [round(i * (length - side) / (count - 1)) for i in range(count)]
