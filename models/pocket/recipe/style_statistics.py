"""Recognizes styles by a linear discriminant of classical measures.

It is fitted on drawn pictures, never on the model's.
"""

import random
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage

from .checker import lab_of
from .drawing import draw_scene
from .scenes import held_out_scene, random_landscape
from .styles import BLUEPRINT, DOTS, SHADE, STRIPES, STYLES, TILES, styled_scene

PLAIN = "base"
SIDE = 256
EXAMPLES = 60
"""Drawn pictures of each class that the discriminant is fitted on."""
IN_SHADOW = 20.0
"""A color not further than this (CIE76) from a shadow's counts as one: the autoencoder draws it up to 13 off."""


def features(picture: Image.Image) -> np.ndarray:
    """Return seventeen numbers of a picture.

    They are lightness, chroma, shares of typical colors, edges and their direction, periods, specks, unrest and
    shadow.
    """
    small = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
    rgb = np.asarray(small, dtype=np.float32)
    lab = lab_of(rgb)
    light, chroma = lab[..., 0], np.hypot(lab[..., 1], lab[..., 2])
    warm = (lab[..., 1] > -2) & (lab[..., 2] > 8) & (lab[..., 2] < 45) & (lab[..., 1] < 22)
    down, across = np.gradient(ndimage.gaussian_filter(light, 1.0))
    energy = float((down**2 + across**2).mean()) + 1e-3
    in_shadow = np.linalg.norm(lab - lab_of(SHADE[None, None]), axis=2) < IN_SHADOW
    return np.array(
        [
            light.mean() / 100,
            light.std() / 50,
            chroma.mean() / 60,
            ((light > 94) & (chroma < 8)).mean(),
            (light < 9).mean(),
            (np.linalg.norm(lab - lab_of(BLUEPRINT[None, None]), axis=2) < 18).mean(),
            warm.mean(),
            np.sqrt(energy) / 5,
            float((down * across).mean()) / energy * 2,
            _tone(light.mean(axis=0), TILES) + _tone(light.mean(axis=1), TILES),
            _tone(np.abs(across).mean(axis=0), TILES) + _tone(np.abs(down).mean(axis=1), TILES),
            2 * np.tanh(4 * _diagonal(light, STRIPES)),
            2 * np.tanh(3 * _lattice(lab[..., 2], DOTS)),
            np.abs(light - ndimage.median_filter(light, 13)).mean() / 10,
            np.linalg.norm(lab - ndimage.median_filter(lab, (13, 13, 1)), axis=2).mean() / 20,
            np.linalg.norm(lab - ndimage.uniform_filter(lab, (25, 25, 1)), axis=2).mean(),
            2 * np.tanh(60 * _solid(in_shadow)),
        ]
    )


@dataclass(frozen=True)
class StyleDiscriminant:
    """Linear discriminant analysis: class means, one shared covariance."""

    names: tuple[str, ...]
    means: np.ndarray
    precision: np.ndarray

    def classify(self, picture: Image.Image) -> str:
        offsets = self.means - features(picture)
        distances = np.einsum("ij,jk,ik->i", offsets, self.precision, offsets)
        return self.names[int(distances.argmin())]


def fit_discriminant(seed: int = 7) -> StyleDiscriminant:
    rng = random.Random(seed)
    names = (PLAIN, *STYLES)
    groups: list[np.ndarray] = []
    for name in names:
        rows: list[np.ndarray] = []
        for i in range(EXAMPLES):
            scene = random_landscape(rng) if i % 5 == 0 else held_out_scene(rng, 1 + i % 2)
            picture = draw_scene(scene, SIDE, SIDE) if name == PLAIN else styled_scene(scene, name, SIDE, SIDE, rng)
            rows.append(features(picture))
        groups.append(np.stack(rows))
    means = np.stack([group.mean(axis=0) for group in groups])
    spread = np.concatenate([group - mean for group, mean in zip(groups, means, strict=True)])
    covariance = spread.T @ spread / len(spread) + 1e-4 * np.eye(spread.shape[1])
    return StyleDiscriminant(names, means, np.linalg.inv(covariance))


def _solid(mask: np.ndarray) -> float:
    """Return the share of the picture that the mask's solid regions cover: thin seams at edges do not count."""
    return float(ndimage.binary_opening(mask, iterations=2).mean())


def _tone(profile: np.ndarray, cycles: int) -> float:
    """Return the share of a profile's variation that repeats `cycles` times, the first harmonics included."""
    power = np.abs(np.fft.rfft(profile - profile.mean())) ** 2
    return float(power[cycles::cycles].sum() / (power[1:].sum() + 1e-3))


def _diagonal(light: np.ndarray, cycles: int) -> float:
    """Return the square root of the share of variation that repeats as often across as down.

    Such a pattern runs down to the left.
    """
    power = np.abs(np.fft.rfft2(light - light.mean())) ** 2
    return float(np.sqrt(power[cycles, cycles] / (power[:, 1:].sum() + 1e-3)))


def _lattice(values: np.ndarray, cycles: int) -> float:
    """Return the square root of the share of variation that repeats so often across or down.

    Harmonics are left out.
    """
    power = np.abs(np.fft.fft2(values - values.mean())) ** 2
    return float(np.sqrt(2 * (power[0, cycles] + power[cycles, 0]) / (power.sum() + 1e-3)))
