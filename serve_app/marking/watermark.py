"""An imperceptible watermark: a pattern of signs that a secret tells, added to the luminance of a picture.

Spread spectrum (Cox et al., *Secure spread spectrum watermarking for multimedia*, 1997) on a grid of 256 × 256 whatever
the picture's size, so that it is still there when the picture is made larger or smaller. One operator has one pattern:
the same pixels are marked alike.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageFilter

GRID = 256
"""The pattern lies on a grid of this many cells a side, and so does what is looked at to find it."""
CELL = 2
"""One sign covers a square of this many cells: what is finer does not survive JPEG at half the size."""
FALSE_POSITIVES = 1e-6
"""The bound of the share of unmarked pictures, whatever they show, that are taken for marked."""
THRESHOLD = math.sqrt(2 * math.log(1 / FALSE_POSITIVES))
"""A picture is marked from this score on, 5.26. Of a picture that does not know the secret the score is a sum of weights
times signs that are tossed like coins, divided by the root of the sum of squared weights; Hoeffding's inequality (1963)
bounds the chance that it reaches t by exp(-t² / 2)."""
LEAST, MOST, PER_CONTRAST = 1, 2, 0.5
"""How many of 255 levels a sign adds or takes: `LEAST` on plain ground, more with the contrast around, and nowhere more
than `MOST`, so that no picture's PSNR is below 10 log10(255² / 2²) = 42.1 dB."""
LEAST_SIDE = 128
"""A picture with a shorter side is not marked: signs of less than a pixel are lost, first in a JPEG of even ground."""
_STEP = 16
"""A level has this many steps while the pattern is enlarged: in bytes, where Pillow computes with integers alone, so that
every machine adds the same."""

_STRENGTHS = np.array([round(_STEP * max(LEAST, min(MOST, PER_CONTRAST * each))) for each in range(256)], np.int16)
"""How many steps a sign has, by the contrast around: the mean distance of a cell from the mean of its neighbours."""
_SIGNED = [max(-MOST, min(MOST, round((step - 128) / _STEP))) for step in range(256)]
_LEVELS = [max(0, level) for level in _SIGNED], [max(0, -level) for level in _SIGNED]

Pixels = NDArray[np.uint8]
"""An image of shape [height, width, 3], RGB."""
Luminance = NDArray[np.float32]
"""A picture's luminance on the grid, of shape [256, 256]."""


class Watermark:
    """The pattern of one secret."""

    def __init__(self, key: bytes) -> None:
        side = GRID // CELL
        bits = np.unpackbits(np.frombuffer(hashlib.shake_256(key).digest(side * side // 8), np.uint8))
        self._signs = np.kron(bits.reshape(side, side).astype(np.int16) * 2 - 1, np.ones((CELL, CELL), np.int16))

    def added_to(self, pixels: Pixels) -> Pixels:
        """Return the picture with the pattern in it; one with a side below `LEAST_SIDE` as it is."""
        if min(pixels.shape[:2]) < LEAST_SIDE:
            return pixels
        picture = Image.fromarray(pixels)
        ground = picture.convert("L").resize((GRID, GRID), Image.Resampling.BOX)
        around = ImageFilter.BoxBlur(2)
        contrast = np.asarray(ImageChops.difference(ground, ground.filter(around)).filter(around))
        pattern = (128 + self._signs * _STRENGTHS[contrast]).astype(np.uint8)
        large = Image.fromarray(pattern).resize(picture.size, Image.Resampling.BICUBIC)
        more, less = (Image.merge("RGB", [large.point(levels)] * 3) for levels in _LEVELS)
        return np.asarray(ImageChops.subtract(ImageChops.add(picture, more), less))

    def score(self, luminance: Luminance) -> float:
        """Return how much of the pattern is in a picture: `THRESHOLD` and more where it is, about 0 where it is not."""
        weights = _weights(luminance)
        of_signs = weights.reshape(GRID // CELL, CELL, GRID // CELL, CELL).sum((1, 3))
        size = float(np.sqrt((of_signs**2).sum()))
        return float((weights * self._signs).sum() / size) if size > 0 else 0.0


def luminance_of(picture: Image.Image) -> Luminance:
    """Return a picture's luminance on the grid, whatever its size and mode."""
    return np.asarray(picture.convert("L").convert("F").resize((GRID, GRID), Image.Resampling.BICUBIC), np.float32)


def _weights(luminance: Luminance) -> NDArray[np.float64]:
    """Return the fine structure of a picture, in which the pattern stands out, evened out over the picture."""
    fine = luminance - _smooth(luminance, 2)
    return fine / (np.sqrt(_smooth(fine**2, 4)) + 1.0)


def _smooth(values: NDArray[np.floating], radius: int) -> NDArray[np.float64]:
    """Return the mean of the square of this radius around each cell."""
    width = 2 * radius + 1
    for axis in (0, 1):
        padding = [(radius + 1, radius) if each == axis else (0, 0) for each in (0, 1)]
        sums = np.cumsum(np.pad(values, padding, mode="reflect").astype(np.float64), axis)
        whole, before = np.arange(width, width + GRID), np.arange(GRID)
        values = (sums.take(whole, axis) - sums.take(before, axis)) / width
    return values
