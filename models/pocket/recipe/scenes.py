"""The world the pocket model knows: what a picture may hold, and how a random one is chosen."""

import random
import zlib
from dataclasses import dataclass

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 42, 46),
    "orange": (246, 140, 30),
    "yellow": (250, 216, 64),
    "green": (48, 164, 80),
    "blue": (44, 92, 220),
    "purple": (132, 58, 180),
    "pink": (246, 150, 190),
    "white": (246, 246, 246),
    "black": (28, 28, 34),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring", "moon", "cross")
POSITIONS: dict[str, tuple[float, float]] = {
    "left": (0.27, 0.5),
    "right": (0.73, 0.5),
    "top": (0.5, 0.27),
    "bottom": (0.5, 0.73),
    "center": (0.5, 0.5),
}
SIZES = {"small": 0.12, "medium": 0.18, "large": 0.25}
SIZES_OF_TWO = {"small": 0.13, "medium": 0.165, "large": 0.20}
"""Radii as a share of the picture's shorter side; two objects are drawn smaller so that they never touch."""
RELATIONS = ("left of", "right of", "above", "below")
LANDSCAPES: dict[str, tuple[str, ...]] = {
    "hills": ("sun", "hills"),
    "house": ("house", "roof", "field"),
    "boat": ("boat", "sail", "water"),
    "tree": ("leaves", "hill"),
    "mountains": ("moon", "mountains"),
    "flower": ("petals", "middle"),
}
"""Each landscape's colored parts besides the sky, in the order in which captions name them."""
PARTS = tuple(part for parts in LANDSCAPES.values() for part in parts)
PLACES_OF_PARTS = {
    **dict.fromkeys(("sun", "moon", "roof", "sail", "leaves", "petals"), "top"),
    **dict.fromkeys(("house", "boat", "middle"), "center"),
    **dict.fromkeys(("hills", "field", "water", "hill", "mountains"), "bottom"),
}
"""The position that each part is nearest to."""
LANDSCAPE_COLORS: dict[str, tuple[str, ...]] = {
    "sky": ("blue", "white", "pink", "orange", "yellow", "purple", "black"),
    "sun": ("yellow", "orange", "red", "white"),
    "moon": ("white", "yellow", "orange"),
    "hills": ("green", "purple", "blue", "orange", "black"),
    "hill": ("green", "yellow", "orange", "white"),
    "field": ("green", "yellow", "orange", "white"),
    "water": ("blue", "green", "purple", "black"),
    "mountains": ("purple", "blue", "green", "white", "black"),
}
"""Parts that are not listed take any color."""


@dataclass(frozen=True)
class Thing:
    """One object.

    Its center and radius are shares of the picture's sides and of its shorter side. Its position is what captions may
    say of its place, if anything.
    """

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float
    position: str | None = None


@dataclass(frozen=True)
class Scene:
    """A picture's whole content.

    It is one or two things on a background, or a landscape under a sky (the background).
    """

    background: str
    things: tuple[Thing, ...] = ()
    relation: str | None = None
    landscape: str | None = None
    parts: tuple[str, ...] = ()
    wobble: float = 0.0

    @property
    def colors(self) -> frozenset[str]:
        return frozenset((self.background, *self.parts, *(thing.color for thing in self.things)))


def random_scene(rng: random.Random) -> Scene:
    """Draw a random scene: nine in twenty have two objects, eight are landscapes, three have one object.

    Two objects are learned late; landscapes have many parts and there are six of them.
    """
    draw = rng.random()
    if draw < 0.15:
        return random_single(rng)
    return random_pair(rng) if draw < 0.6 else random_landscape(rng)


def training_scene(rng: random.Random) -> Scene:
    """Return a random scene none of whose objects is held out for the report."""
    scene = random_scene(rng)
    while holds_out(scene):
        scene = random_scene(rng)
    return scene


def held_out_scene(rng: random.Random, things: int) -> Scene:
    """Return a scene of one or two objects with at least one that no training scene showed."""
    draw = random_single if things == 1 else random_pair
    scene = draw(rng)
    while not holds_out(scene):
        scene = draw(rng)
    return scene


def holds_out(scene: Scene) -> bool:
    """Return whether training leaves the scene out, as one in twelve of shape, color and background."""
    return any(
        zlib.crc32(f"{thing.shape} {thing.color} {scene.background}".encode()) % 12 == 0 for thing in scene.things
    )


def random_single(rng: random.Random) -> Scene:
    """Draw a scene of one object; where no place is stated, it is about the center.

    While it was anywhere, such objects came out as blobs (seen), and the prompt that people try first states none.
    """
    background = rng.choice(tuple(COLORS))
    position = rng.choice(tuple(POSITIONS)) if rng.random() < 0.75 else None
    size = rng.choice(("small", "medium", "medium", "large"))
    x, y = POSITIONS[position] if position else (rng.uniform(0.46, 0.54), rng.uniform(0.46, 0.54))
    return Scene(background, (_thing(rng, background, size, SIZES[size], x, y, position),))


def random_pair(rng: random.Random) -> Scene:
    background = rng.choice(tuple(COLORS))
    relation = rng.choice((*RELATIONS, "and"))
    near, far = (0.26, 0.5), (0.74, 0.5)
    if relation in ("above", "below"):
        near, far = (0.5, 0.26), (0.5, 0.74)
    if relation in ("right of", "below"):
        near, far = far, near
    things = []
    for x, y in (near, far):
        size = rng.choice(("small", "medium", "medium", "large"))
        things.append(_thing(rng, background, size, SIZES_OF_TWO[size], x, y, None))
    return Scene(background, tuple(things), relation)


def random_landscape(rng: random.Random) -> Scene:
    landscape = rng.choice(tuple(LANDSCAPES))
    sky = rng.choice(LANDSCAPE_COLORS["sky"])
    parts: list[str] = []
    for part in LANDSCAPES[landscape]:
        choices = [c for c in LANDSCAPE_COLORS.get(part, tuple(COLORS)) if c not in (sky, *parts)]
        parts.append(rng.choice(choices))
    return Scene(sky, landscape=landscape, parts=tuple(parts), wobble=rng.uniform(-1, 1))


def _thing(
    rng: random.Random, background: str, size: str, radius: float, x: float, y: float, position: str | None
) -> Thing:
    color = rng.choice([c for c in COLORS if c != background])
    return Thing(
        shape=rng.choice(SHAPES),
        color=color,
        size=size,
        x=x + rng.uniform(-0.025, 0.025),
        y=y + rng.uniform(-0.025, 0.025),
        radius=radius * rng.uniform(0.93, 1.07),
        position=position,
    )
