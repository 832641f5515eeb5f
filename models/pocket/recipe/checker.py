"""Judges a picture by classical image measures, without any model: colors, places and contours."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image
from scipy import ndimage

from .drawing import LIGHT_BOTTOM, LIGHT_TOP, silhouette
from .scenes import COLORS, POSITIONS, SHAPES, Scene, Thing

SIDE = 256
"""Pictures are measured at this length of their shorter side."""
CONTRAST = 17.0
"""Least Lab distance from the background at which a pixel belongs to an object."""
LEAST_AREA = 0.004
"""Smaller spots, as a share of the picture, are ignored."""
LEAST_OVERLAP = 0.70
PLACE_TOLERANCE = 0.16

Array = np.ndarray


@dataclass(frozen=True)
class Spot:
    """One object as found: `overlaps` says how well each shape's silhouette covers it, 0..1."""

    color: str
    x: float
    y: float
    area: float
    overlaps: dict[str, float]

    @property
    def shape(self) -> str | None:
        best = max(self.overlaps, key=lambda shape: self.overlaps[shape])
        return best if self.overlaps[best] >= LEAST_OVERLAP else None

    @property
    def position(self) -> str | None:
        distances = {name: max(abs(self.x - x), abs(self.y - y)) for name, (x, y) in POSITIONS.items()}
        nearest = min(distances, key=lambda name: distances[name])
        return nearest if distances[nearest] <= PLACE_TOLERANCE else None


@dataclass(frozen=True)
class Verdict:
    """What of the scene the picture shows.

    `objects` says for each thing whether color, shape and place are right.
    """

    background: bool
    color: bool
    position: bool
    shape: bool
    objects: tuple[bool, ...]

    @property
    def accepted(self) -> bool:
        return self.background and all(self.objects)


def check(picture: Image.Image, scene: Scene) -> Verdict:
    """Compares the picture with a scene of one or two things (landscapes: the background alone)."""
    lab = lab_of(_without_light(_small(picture)))
    behind = _frame_color(lab)
    background = nearest_color(behind) == scene.background
    if not scene.things:
        return Verdict(background, True, True, True, ())
    spots = _spots(lab, behind, len(scene.things))
    pairs = _matched(scene, spots)
    objects = tuple(
        spot is not None and spot.color == thing.color and spot.shape == thing.shape and _placed(thing, spot)
        for thing, spot in pairs
    )
    found = [(thing, spot) for thing, spot in pairs if spot]
    everyone = len(found) == len(pairs)
    return Verdict(
        background=background,
        color=everyone and all(spot.color == thing.color for thing, spot in found),
        position=everyone and all(_placed(thing, spot) for thing, spot in found) and _related(scene, found),
        shape=everyone and all(spot.shape == thing.shape for thing, spot in found),
        objects=objects if _related(scene, found) else (False,) * len(pairs),
    )


def color_share(picture: Image.Image, color: str) -> float:
    """Return the share of pixels that are nearest to the color, 0..1."""
    lab = lab_of(_without_light(_small(picture)))
    names, palette = _palette()
    distances = np.linalg.norm(lab[:, :, None] - palette, axis=3)
    return float((distances.argmin(axis=2) == names.index(color)).mean())


def nearest_color(lab: Array) -> str:
    names, palette = _palette()
    return names[int(np.linalg.norm(palette - lab, axis=1).argmin())]


def palette_distance(picture: Image.Image) -> float:
    """Return the mean Lab distance from each pixel to the world's nearest color.

    It is large in burnt-out or muddy pictures.
    """
    lab = lab_of(_without_light(_small(picture)))
    return float(np.linalg.norm(lab[:, :, None] - _palette()[1], axis=3).min(axis=2).mean())


def _small(picture: Image.Image) -> Array:
    scale = SIDE / min(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    return np.asarray(picture.convert("RGB").resize(size, Image.Resampling.BOX), dtype=np.float32)


def _without_light(rgb: Array) -> Array:
    light = np.linspace(LIGHT_TOP, LIGHT_BOTTOM, len(rgb), dtype=np.float32)
    return np.clip(rgb / light[:, None, None], 0, 255)


def _frame_color(lab: Array) -> Array:
    edge = max(2, len(lab) // 32)
    sides = (lab[:edge], lab[-edge:], lab[:, :edge], lab[:, -edge:])
    return np.median(np.concatenate([side.reshape(-1, 3) for side in sides]), axis=0)


def _spots(lab: Array, behind: Array, count: int) -> list[Spot]:
    """Return the `count` largest connected regions that differ from the background, largest first."""
    height, width = lab.shape[:2]
    mask = ndimage.binary_opening(np.linalg.norm(lab - behind, axis=2) > CONTRAST, iterations=1)
    labels, found = ndimage.label(mask)
    areas = np.bincount(labels.ravel(), minlength=found + 1)[1:] / mask.size
    largest = [i for i in np.argsort(-areas)[:count] if areas[i] >= LEAST_AREA]
    spots: list[Spot] = []
    for i in largest:
        region = labels == i + 1
        rows, columns = np.flatnonzero(region.any(axis=1)), np.flatnonzero(region.any(axis=0))
        inside = ndimage.binary_erosion(region, iterations=2)
        color = np.median(lab[inside if inside.any() else region], axis=0)
        crop = region[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        x, y = (columns[0] + columns[-1] + 1) / 2 / width, (rows[0] + rows[-1] + 1) / 2 / height
        spots.append(Spot(nearest_color(color), float(x), float(y), float(areas[i]), _overlaps(crop)))
    return spots


def _overlaps(region: Array) -> dict[str, float]:
    """Return intersection over union with each silhouette.

    Both are stretched to the same square; slim regions are kept slim.
    """
    tall, wide = region.shape
    if max(tall, wide) > 2 * min(tall, wide):
        return dict.fromkeys(SHAPES, 0.0)
    square = _stretched(region)
    return {
        shape: float((square & mask).sum() / max(1, (square | mask).sum())) for shape, mask in _silhouettes().items()
    }


@cache
def _silhouettes() -> dict[str, Array]:
    masks: dict[str, Array] = {}
    for shape in SHAPES:
        mask = silhouette(shape, 128)
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        masks[shape] = _stretched(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return masks


def _stretched(region: Array, side: int = 48) -> Array:
    image = Image.fromarray(region.astype(np.uint8) * 255).resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(image) > 127


def _matched(scene: Scene, spots: list[Spot]) -> list[tuple[Thing, Spot | None]]:
    """Return each thing with its spot; of two spots the pairing that agrees in more colors and shapes."""
    padded: list[Spot | None] = [*spots, *[None] * (len(scene.things) - len(spots))]
    orders = [padded, padded[::-1]]

    def agreement(order: list[Spot | None]) -> int:
        return sum(
            (spot.color == thing.color) + (spot.shape == thing.shape)
            for thing, spot in zip(scene.things, order, strict=True)
            if spot
        )

    return list(zip(scene.things, max(orders, key=agreement), strict=True))


def _placed(thing: Thing, spot: Spot) -> bool:
    return thing.position is None or spot.position == thing.position


def _related(scene: Scene, found: list[tuple[Thing, Spot]]) -> bool:
    if len(scene.things) < 2:
        return True
    if len(found) < 2:
        return False
    (_, first), (_, second) = found
    across, down = second.x - first.x, second.y - first.y
    gap = 0.1
    return {
        "left of": across > gap,
        "right of": across < -gap,
        "above": down > gap,
        "below": down < -gap,
        "and": max(abs(across), abs(down)) > gap,
    }[scene.relation or "and"]


@cache
def _palette() -> tuple[tuple[str, ...], Array]:
    colors = np.array(list(COLORS.values()), dtype=np.float32)
    return tuple(COLORS), lab_of(colors[None])[0]


def lab_of(rgb: Array) -> Array:
    """sRGB 0..255 to CIE L*a*b* (D65)."""
    share = rgb / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)
