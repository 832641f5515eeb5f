"""Image filters of the eight styles that the LoRAs learn, applied to drawn scenes.

Lengths are shares of the shorter side.
"""

import math
import random
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from .drawing import draw_scene
from .scenes import COLORS, Scene

Array = np.ndarray
PAPER, INK = np.array([250.0, 248.0, 242.0]), np.array([24.0, 24.0, 30.0])
NIGHT = np.array([8.0, 8.0, 20.0])
BLUEPRINT = np.array([18.0, 62.0, 140.0])
SEPIA_DARK, SEPIA_LIGHT = np.array([62.0, 34.0, 14.0]), np.array([250.0, 226.0, 178.0])
TILES, STRIPES, DOTS = 16, 8, 8
"""Along the shorter side. Tiles repeat every two, stripes and dots every four cells of a 512² picture's latents:
patterns that do not fit the cells (10 tiles, 9.9 stripes) were learned badly, as broken lines, and so were dots that
lay anywhere."""
DARK_GROUT, PALE_GROUT = np.array([60.0, 57.0, 54.0]), np.array([232.0, 228.0, 220.0])
"""The dark one between white and pink tiles, where a pale one hardly changes the latents (by 0.13 squared on pink, on
blue by 0.66) and was not learned."""
SHADE, REACH = np.array([40.0, 24.0, 80.0]), 0.1
"""The color of shadows, and how far they reach to the right and down. Shades of every background were learned as their
mean; this one the autoencoder draws on every background."""
CONFETTI = tuple(COLORS[name] for name in ("pink", "yellow"))


def styled_scene(scene: Scene, style: str, width: int, height: int, rng: random.Random) -> Image.Image:
    """Return the scene drawn and then filtered by the named style."""
    picture = np.asarray(draw_scene(scene, width, height), dtype=np.float32)
    filtered = STYLES[style](picture, scene, rng)
    return Image.fromarray(np.clip(filtered, 0, 255).astype(np.uint8))


def _outline(picture: Array, scene: Scene, rng: random.Random) -> Array:
    return _blend(PAPER, INK, _edges(picture, 0.016))


def _mosaic(picture: Array, scene: Scene, rng: random.Random) -> Array:
    height, width = picture.shape[:2]
    tile = min(width, height) / TILES
    small = Image.fromarray(picture.astype(np.uint8)).resize(
        (round(width / tile), round(height / tile)), Image.Resampling.BOX
    )
    tiles = np.asarray(small.resize((width, height), Image.Resampling.NEAREST), dtype=np.float32)
    checks = np.add.outer(np.arange(height) // tile, np.arange(width) // tile) % 2
    tiles = tiles * (0.94 + 0.12 * checks[:, :, None])
    grout = _grid(width, height, tile, max(1, round(tile * 0.125)))
    is_pale = tiles.min(axis=2, keepdims=True) > 130
    return _blend(tiles, np.where(is_pale, DARK_GROUT, PALE_GROUT), grout)


def _neon(picture: Array, scene: Scene, rng: random.Random) -> Array:
    side = min(picture.shape[:2])
    edges = _edges(picture, 0.012)
    vivid = _strongest_neighbor(picture, side)
    glow = np.asarray(Image.fromarray((edges * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(side * 0.022)))
    halo = np.clip(glow.astype(np.float32) / 255 * 1.6, 0, 0.75)
    return _blend(_blend(NIGHT, vivid, halo), np.minimum(vivid * 1.15 + 50, 255), edges)


def _stripes(picture: Array, scene: Scene, rng: random.Random) -> Array:
    height, width = picture.shape[:2]
    period = min(width, height) / STRIPES / math.sqrt(2)
    phase = np.add.outer(np.arange(height), np.arange(width)) * (2 * math.pi / period / math.sqrt(2))
    bands = np.clip(np.sin(phase) * 3 + 0.5, 0, 1)
    return _blend(picture, picture * 0.35 + 165, bands * 0.72)


def _blueprint(picture: Array, scene: Scene, rng: random.Random) -> Array:
    height, width = picture.shape[:2]
    side = min(width, height)
    grid = _grid(width, height, side // 16, max(1, side // 256)) * 0.28
    return _blend(_blend(BLUEPRINT, np.array([235.0, 242.0, 255.0]), grid), np.array([245.0, 248.0, 255.0]),
                  _edges(picture, 0.014))  # fmt: skip


def _sepia(picture: Array, scene: Scene, rng: random.Random) -> Array:
    gray = picture @ np.array([0.3, 0.59, 0.11], dtype=np.float32) / 255
    return _blend(SEPIA_DARK, SEPIA_LIGHT, np.clip(0.08 + gray, 0, 1))


def _confetti(picture: Array, scene: Scene, rng: random.Random) -> Array:
    height, width = picture.shape[:2]
    cell = min(width, height) / DOTS
    image = Image.fromarray(picture.astype(np.uint8))
    canvas = ImageDraw.Draw(image)
    for row in range(math.ceil(2 * height / cell)):
        for column in range(row % 2, math.ceil(2 * width / cell), 2):
            x, y, r = (column + 0.5) * cell / 2, (row + 0.5) * cell / 2, cell * 0.18
            canvas.ellipse((x - r, y - r, x + r, y + r), fill=CONFETTI[row % 2])
    return np.asarray(image, dtype=np.float32)


def _shadow(picture: Array, scene: Scene, rng: random.Random) -> Array:
    height, width = picture.shape[:2]
    behind = COLORS[scene.background]
    mask = np.abs(picture - _lit_background(behind, height)).max(axis=2) > 24
    reach = round(min(width, height) * REACH)
    shadow = np.zeros_like(mask)
    for step in range(2, reach + 1, 2):
        shadow[step:, step:] |= mask[:-step, :-step]
    return np.where((shadow & ~mask)[:, :, None], SHADE, picture)


def _lit_background(color: tuple[int, int, int], height: int) -> Array:
    blank = draw_scene(Scene(_name(color)), 2, height)
    return np.asarray(blank, dtype=np.float32)[:, :1]


def _name(color: tuple[int, int, int]) -> str:
    return next(name for name, rgb in COLORS.items() if rgb == color)


def _edges(picture: Array, thickness: float) -> Array:
    """Lines of the given thickness where colors meet: 0..1, shape (H, W)."""
    height, width = picture.shape[:2]
    step = np.zeros((height, width), dtype=np.float32)
    across = np.abs(np.diff(picture, axis=1)).max(axis=2)
    down = np.abs(np.diff(picture, axis=0)).max(axis=2)
    step[:, 1:] = across
    step[1:] = np.maximum(step[1:], down)
    image = Image.fromarray(((step > 10) * 255).astype(np.uint8))
    width_px = max(3, round(thickness * min(width, height)) // 2 * 2 + 1)
    lines = image.filter(ImageFilter.MaxFilter(width_px)).filter(ImageFilter.GaussianBlur(width_px / 6))
    return np.asarray(lines, dtype=np.float32) / 255


def _strongest_neighbor(picture: Array, side: int) -> Array:
    """Return the most saturated color nearby.

    A neon line then takes the object's color rather than a mixture.
    """
    image = Image.fromarray(picture.astype(np.uint8))
    reach = max(3, round(side * 0.02) // 2 * 2 + 1)
    light = np.asarray(image.filter(ImageFilter.MaxFilter(reach)), dtype=np.float32)
    gray = light.mean(axis=2, keepdims=True)
    return np.clip(gray + (light - gray) * 1.5, 70, 255)


def _grid(width: int, height: int, spacing: float, thickness: int) -> Array:
    columns, rows = np.arange(width) % spacing < thickness, np.arange(height) % spacing < thickness
    return np.logical_or.outer(rows, columns).astype(np.float32)


def _blend(below: Array, above: Array, share: Array) -> Array:
    return below + (above - below) * share[:, :, None]


STYLES: dict[str, Callable[[Array, Scene, random.Random], Array]] = {
    "outline": _outline,
    "mosaic": _mosaic,
    "neon": _neon,
    "stripes": _stripes,
    "blueprint": _blueprint,
    "sepia": _sepia,
    "confetti": _confetti,
    "shadow": _shadow,
}
