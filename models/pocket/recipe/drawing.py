"""Draws a scene with Pillow, at any size, anti-aliased."""

import math
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw

from .scenes import COLORS, LANDSCAPES, Scene, Thing

OVERSAMPLING = 2
LIGHT_TOP, LIGHT_BOTTOM = 1.04, 0.90
"""Brightness falls gently from the top of every picture to its bottom."""

Point = tuple[float, float]
Rgb = tuple[int, int, int]
Fills = Mapping[str, Rgb | int]
"""What to fill each part of a landscape with, and each of its details."""
DETAILS: dict[str, tuple[str, float]] = {
    "far hills": ("hills", 0.78),
    "windows": ("house", 0.45),
    "near water": ("water", 0.82),
    "trunk": ("leaves", 1.0),
    "far mountains": ("mountains", 0.8),
    "stem": ("petals", 1.0),
}
"""The part that each belongs to, and how much darker it is; some have colors of their own (`_colors_of_parts`)."""


def draw_scene(scene: Scene, width: int, height: int) -> Image.Image:
    """Draw the scene as an RGB picture of width by height pixels."""
    return _lit(draw_flat(scene, width * OVERSAMPLING, height * OVERSAMPLING).reduce(OVERSAMPLING))


def draw_flat(scene: Scene, width: int, height: int) -> Image.Image:
    """Draw the same in its plain colors, neither lit nor smoothed."""
    image = Image.new("RGB", (width, height), COLORS[scene.background])
    canvas = ImageDraw.Draw(image)
    if scene.landscape:
        _LANDSCAPES[scene.landscape](canvas, _colors_of_parts(scene), scene.wobble, width, height)
    for thing in scene.things:
        draw_thing(canvas, thing, width, height, fill=COLORS[thing.color])
    return image


def draw_parts(scene: Scene, numbers: Mapping[str, int], width: int, height: int) -> Image.Image:
    """Draw the numbers of the landscape's parts, as 8 bits.

    They are 0 where there is only sky or a part without a number.
    """
    image = Image.new("L", (width, height))
    if scene.landscape:
        fills = {part: numbers.get(part, 0) for part in LANDSCAPES[scene.landscape]}
        fills |= {detail: fills[part] for detail, (part, _) in DETAILS.items() if part in fills}
        _LANDSCAPES[scene.landscape](ImageDraw.Draw(image), fills, scene.wobble, width, height)
    return image


def silhouette(shape: str, side: int = 64) -> np.ndarray:
    """Return the shape alone as a boolean mask of side by side pixels."""
    image = Image.new("L", (side, side))
    thing = Thing(shape, "white", "medium", 0.5, 0.5, 0.42)
    draw_thing(ImageDraw.Draw(image), thing, side, side, fill=255)
    return np.asarray(image) > 127


def pixels(image: Image.Image) -> np.ndarray:
    """Return the picture as float32 in -1..1, channels first."""
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


def _lit(image: Image.Image) -> Image.Image:
    light = np.linspace(LIGHT_TOP, LIGHT_BOTTOM, image.height, dtype=np.float32)[:, None, None]
    return Image.fromarray(np.clip(np.asarray(image, dtype=np.float32) * light, 0, 255).astype(np.uint8))


def draw_thing(canvas: ImageDraw.ImageDraw, thing: Thing, width: int, height: int, *, fill: Rgb | int) -> None:
    x, y, r = thing.x * width, thing.y * height, thing.radius * min(width, height)
    if thing.shape == "circle":
        canvas.ellipse(_box(x, y, r), fill=fill)
    elif thing.shape == "ring":
        canvas.ellipse(_box(x, y, r), outline=fill, width=max(1, round(r * 0.36)))
    else:
        canvas.polygon([(x + r * px, y + r * py) for px, py in OUTLINES[thing.shape]], fill=fill)


def _box(x: float, y: float, r: float) -> tuple[float, float, float, float]:
    return (x - r, y - r, x + r, y + r)


def _star() -> list[Point]:
    radii = [1.08 if i % 2 == 0 else 0.45 for i in range(10)]
    return [(q * math.sin(math.pi * i / 5), 0.06 - q * math.cos(math.pi * i / 5)) for i, q in enumerate(radii)]


def _heart() -> list[Point]:
    turns = [2 * math.pi * i / 80 for i in range(80)]
    return [
        (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16)
        for t in turns
    ]


def _moon() -> list[Point]:
    """Return a crescent open to the right: the outer circle's arc, then back along a smaller circle moved right."""
    outer = [math.radians(48 + 264 * i / 60) for i in range(61)]
    points = [(0.12 + math.cos(a), math.sin(a)) for a in outer]
    tip_x, tip_y = points[-1]
    center = 0.62
    radius = math.hypot(tip_x - center, tip_y)
    start = math.atan2(tip_y, tip_x - center) % (2 * math.pi)
    inner = [start - 2 * (start - math.pi) * i / 40 for i in range(41)]
    return points + [(center + radius * math.cos(a), radius * math.sin(a)) for a in inner]


def _cross() -> list[Point]:
    a, b = 0.32, 0.95
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]


OUTLINES: dict[str, list[Point]] = {
    "square": [(-0.87, -0.87), (0.87, -0.87), (0.87, 0.87), (-0.87, 0.87)],
    "triangle": [(0.0, -0.95), (1.0, 0.8), (-1.0, 0.8)],
    "star": _star(),
    "heart": _heart(),
    "moon": _moon(),
    "cross": _cross(),
}


def _colors_of_parts(scene: Scene) -> dict[str, Rgb]:
    named = dict(zip(LANDSCAPES[scene.landscape or ""], scene.parts, strict=True))
    fills = {part: COLORS[color] for part, color in named.items()}
    fills |= {detail: _shade(fills[part], share) for detail, (part, share) in DETAILS.items() if part in fills}
    if named.get("house") == "black":
        fills["windows"] = COLORS["white"]
    fills["trunk"] = (112, 72, 44)
    fills["stem"] = COLORS["green"] if scene.background != "green" else (20, 90, 40)
    return fills


def _shade(color: Rgb, share: float) -> Rgb:
    red, green, blue = (max(0, min(255, round(value * share))) for value in color)
    return red, green, blue


def _wave(width: int, height: int, level: float, swell: float, phase: float) -> list[Point]:
    xs = [width * i / 60 for i in range(61)]
    crest = [(x, height * (level - swell * math.sin(2.2 * math.pi * x / width + phase))) for x in xs]
    return [*crest, (width, height), (0, height)]


def _hills(canvas: ImageDraw.ImageDraw, fills: Fills, wobble: float, width: int, height: int) -> None:
    side = min(width, height)
    canvas.ellipse(_box(width * (0.5 + 0.2 * wobble), height * 0.33, side * 0.15), fill=fills["sun"])
    canvas.polygon(_wave(width, height, 0.66, 0.07, 1.5 + wobble), fill=fills["far hills"])
    canvas.polygon(_wave(width, height, 0.76, 0.06, 4.0 + wobble), fill=fills["hills"])


def _house(canvas: ImageDraw.ImageDraw, fills: Fills, wobble: float, width: int, height: int) -> None:
    side, x, ground = min(width, height), width * (0.5 + 0.1 * wobble), height * 0.74
    canvas.rectangle((0, ground, width, height), fill=fills["field"])
    left, right, top = x - side * 0.2, x + side * 0.2, ground - side * 0.28
    canvas.rectangle((left, top, right, ground + side * 0.03), fill=fills["house"])
    canvas.polygon([(left - side * 0.06, top), (right + side * 0.06, top), (x, top - side * 0.21)], fill=fills["roof"])
    canvas.rectangle((x - side * 0.13, top + side * 0.07, x - side * 0.03, top + side * 0.17), fill=fills["windows"])
    canvas.rectangle((x + side * 0.04, top + side * 0.11, x + side * 0.13, ground + side * 0.03), fill=fills["windows"])


def _boat(canvas: ImageDraw.ImageDraw, fills: Fills, wobble: float, width: int, height: int) -> None:
    side, x, level = min(width, height), width * (0.5 + 0.12 * wobble), height * 0.68
    canvas.rectangle((0, level, width, height), fill=fills["water"])
    canvas.polygon(_wave(width, height, 0.86, 0.02, 3 * wobble), fill=fills["near water"])
    top, keel = level - side * 0.04, level + side * 0.1
    hull_points = [
        (x - side * 0.27, top), (x + side * 0.27, top), (x + side * 0.17, keel), (x - side * 0.17, keel),
    ]  # fmt: skip
    canvas.polygon(hull_points, fill=fills["boat"])
    mast = x - side * 0.03
    canvas.polygon([(mast, top - side * 0.44), (mast, top - side * 0.03), (x + side * 0.22, top - side * 0.03)],
                   fill=fills["sail"])  # fmt: skip
    canvas.polygon([(mast - side * 0.03, top - side * 0.36), (mast - side * 0.03, top - side * 0.03),
                    (x - side * 0.2, top - side * 0.03)], fill=fills["sail"])  # fmt: skip


def _tree(canvas: ImageDraw.ImageDraw, fills: Fills, wobble: float, width: int, height: int) -> None:
    side, x, ground = min(width, height), width * (0.5 + 0.12 * wobble), height * 0.78
    canvas.polygon(_wave(width, height, 0.78, 0.05, math.pi * 1.3), fill=fills["hill"])
    canvas.rectangle(
        (x - side * 0.035, ground - side * 0.25, x + side * 0.035, ground + side * 0.06), fill=fills["trunk"]
    )
    for dx, dy, r in ((-0.12, -0.30, 0.12), (0.12, -0.30, 0.12), (0.0, -0.42, 0.15), (0.0, -0.28, 0.12)):
        canvas.ellipse(_box(x + dx * side, ground + dy * side, r * side), fill=fills["leaves"])


def _mountains(canvas: ImageDraw.ImageDraw, fills: Fills, wobble: float, width: int, height: int) -> None:
    side, shift = min(width, height), 0.06 * wobble
    canvas.ellipse(_box(width * (0.72 - 0.4 * (wobble > 0)), height * 0.25, side * 0.1), fill=fills["moon"])
    far = [(-0.1, 1.0), (0.28 + shift, 0.42), (0.62, 1.0)]
    near = [(0.25, 1.0), (0.7 + shift, 0.5), (1.15, 1.0)]
    canvas.polygon([(x * width, y * height) for x, y in far], fill=fills["far mountains"])
    canvas.polygon([(x * width, y * height) for x, y in near], fill=fills["mountains"])


def _flower(canvas: ImageDraw.ImageDraw, fills: Fills, wobble: float, width: int, height: int) -> None:
    side, x, y = min(width, height), width * (0.5 + 0.1 * wobble), height * 0.4
    canvas.rectangle((x - side * 0.022, y, x + side * 0.022, height), fill=fills["stem"])
    for i in range(6):
        turn = math.pi * i / 3 + 0.5
        canvas.ellipse(_box(x + 0.15 * side * math.cos(turn), y + 0.15 * side * math.sin(turn), side * 0.095),
                       fill=fills["petals"])  # fmt: skip
    canvas.ellipse(_box(x, y, side * 0.09), fill=fills["middle"])


_LANDSCAPES = {
    "hills": _hills,
    "house": _house,
    "boat": _boat,
    "tree": _tree,
    "mountains": _mountains,
    "flower": _flower,
}
