"""The recipe's side tasks teach what the pictures show."""

import random

import pytest
import torch

from models.pocket.recipe.layout import AttentionGuide, LayoutReader, place_cover, shape_cover
from models.pocket.recipe.scenes import POSITIONS, SHAPES, random_pair, random_scene
from models.pocket.recipe.text import ABSENT, ANSWERS, MAX_TOKENS, WIDTH, facts, places_of
from models.pocket.recipe.training import Optimisers
from models.pocket.recipe.unet import build_unet
from models.pocket.recipe.upscaler import CompactUpscaler
from models.pocket.recipe.velocity import VelocityLoss, with_twins, words_for

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


def test_the_cover_of_places_is_the_objects_own() -> None:
    rng = random.Random(4)
    for scene in (random_pair(rng) for _ in range(50)):
        shapes, places = shape_cover(scene, CELLS, CELLS), place_cover(scene, CELLS, CELLS)
        assert torch.equal(shapes[0], places[0])
        assert {place for place, _ in places_of(scene)} == {
            place for place, cover in zip(POSITIONS, places[1:], strict=True) if cover.any()
        }


def test_the_unet_learns_its_side_tasks() -> None:
    """On one batch: what a shape covers, from the features; where to look, from the queries and keys."""
    torch.manual_seed(0)
    rng = random.Random(5)
    scenes = [random_pair(rng) for _ in range(4)]
    unet = build_unet()
    layout, guide = LayoutReader(unet), AttentionGuide(unet)
    optimiser = torch.optim.Adam([*unet.parameters(), *layout.parameters()], lr=1e-3)
    latents, text = torch.randn(4, unet.config["in_channels"], 8, 12), torch.randn(4, MAX_TOKENS, WIDTH)
    losses: list[tuple[float, float]] = []
    for _ in range(20):
        unet(latents, 900, text)
        shape, looks = layout.loss(scenes), guide.loss(text, scenes, columns=12, rows=8)
        optimiser.zero_grad()
        (shape + looks).backward()
        optimiser.step()
        losses.append((shape.item(), looks.item()))
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert losses[-1][1] < 0.5 * losses[0][1]


def test_twins_differ_in_their_words_alone_and_must_agree_where_little_noise_is() -> None:
    rng = random.Random(1)
    chosen = with_twins(rng, 1000, 10)
    words = words_for(rng, [random_pair(rng) for _ in chosen])
    assert chosen[6:] == chosen[:4]
    assert all(words[:6])
    assert not any(words[6:])

    told = torch.tensor([0.1] * 6 + [-0.1] * 4).view(10, 1, 1, 1)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(noisy: torch.Tensor, timesteps: torch.Tensor, words: torch.Tensor, **_: bool) -> tuple[torch.Tensor]:
        seen.append((noisy, timesteps))
        return (words.expand_as(noisy),)

    latents = torch.randn(6, 8, 4, 4)
    latents = torch.cat([latents, latents[:4]])

    def loss(words: torch.Tensor, middle: float) -> float:
        torch.manual_seed(0)
        return VelocityLoss(torch.device("cpu"))(forward, latents, words, middle).item()

    assert loss(told, -9.0) > loss(0 * told, -9.0) + 0.1
    assert loss(told, 9.0) < loss(0 * told, 9.0) + 0.1
    for noisy, timesteps in seen:
        assert torch.equal(noisy[6:], noisy[:4])
        assert torch.equal(timesteps[6:], timesteps[:4])


def test_the_optimisers_move_every_weight_and_the_upscaler_learns() -> None:
    """Muon steps flat views of the convolutions: if one were a copy, its weight would stay."""
    torch.manual_seed(0)
    model = CompactUpscaler(2, features=16, layers=2)
    with pytest.raises(ValueError, match="channels_last"):
        Optimisers(model, ("body.0.",))
    model.to("cpu", memory_format=torch.channels_last)  # type: ignore[call-overload]
    before, parameters = [value.detach().clone() for value in model.parameters()], list(model.parameters())
    optimisers = Optimisers(model, ("body.0.", f"body.{len(model.body) - 1}."))
    small = torch.rand(4, 3, 16, 16)
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bicubic")
    losses: list[float] = []
    for _ in range(30):
        loss = (model(small) - large).square().mean().sqrt()
        optimisers.descend(loss, parameters, 5e-3)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not any(torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
