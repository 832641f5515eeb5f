"""Draws training pictures and keeps them in a pool.

To draw one takes as long as to learn from a whole batch of crops.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .drawing import draw_scene
from .scenes import training_scene
from .styles import STYLES, styled_scene

Drawn = TypeVar("Drawn")


def random_picture(rng: random.Random, side: int, styled_share: float) -> Image.Image:
    """Return a square picture of a training scene, in a LoRA's style at the given share."""
    scene = training_scene(rng)
    if rng.random() < styled_share:
        return styled_scene(scene, rng.choice(tuple(STYLES)), side, side, rng)
    return draw_scene(scene, side, side)


def as_tensor(picture: Image.Image) -> Tensor:
    """Return the picture as bytes, channels first: (3, height, width) in 0..255."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def renewed_pool(draw: Callable[[int], Drawn], size: int, start: int, steps: int) -> Iterator[tuple[int, list[Drawn]]]:
    """Yield each step with the pool at that step.

    At every step a new drawing, made beside the learning, replaces the oldest.
    """
    pool = [draw(start - i) for i in range(size)]
    with ThreadPoolExecutor(1) as painter:
        for step in range(start, steps):
            upcoming = painter.submit(draw, step + 1)
            yield step, pool
            pool[step % size] = upcoming.result()
