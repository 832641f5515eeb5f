"""The recipe's side tasks teach what the pictures show."""

import random

import torch

from models.pocket.recipe.layout import shape_cover
from models.pocket.recipe.scenes import POSITIONS, SHAPES, random_scene
from models.pocket.recipe.text import ABSENT, ANSWERS, facts

CELLS = 40


def test_the_object_told_at_a_place_is_drawn_there() -> None:
    rng, told = random.Random(3), 0
    for scene in (random_scene(rng) for _ in range(300)):
        answers = dict(zip(ANSWERS, facts(scene), strict=True))
        cover = shape_cover(scene, CELLS, CELLS)
        assert torch.allclose(cover.sum(dim=0), torch.ones(CELLS, CELLS))
        for place, (x, y) in POSITIONS.items():
            shape = ANSWERS[f"shape at {place}"][answers[f"shape at {place}"]]
            if shape == ABSENT:
                continue
            left, top = round((x - 0.2) * CELLS), round((y - 0.2) * CELLS)
            around = cover[1:, top : top + CELLS * 2 // 5, left : left + CELLS * 2 // 5].sum((1, 2))
            assert SHAPES[int(around.argmax())] == shape, scene
            told += 1
    assert told > 200
