"""The recipe's side tasks teach what the pictures show.

Tests that train for seconds are behind `soak`.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from peft.tuners.lora.layer import LoraLayer
from peft.utils import set_peft_model_state_dict
from torch.nn import functional
from transformers import CLIPTextModel, CLIPTokenizer

from models.pocket.recipe.agreement import EARLY_SHARE, OPEN, SETTLED, AgreementLoss, early_timesteps
from models.pocket.recipe.captions import full_caption, plain_caption
from models.pocket.recipe.checker import lab_of
from models.pocket.recipe.drawing import draw_scene
from models.pocket.recipe.export import ADAPTER, export_lora, lora_config, published_lora
from models.pocket.recipe.latents import cached_latents
from models.pocket.recipe.layout import (
    AttentionGuide,
    LayoutReader,
    colour_cover,
    focus_on_objects,
    kind_cover,
    place_cover,
)
from models.pocket.recipe.lora import StyleLoss, focus_on_style
from models.pocket.recipe.plan import Phase, Plan
from models.pocket.recipe.scenes import (
    COLOURS,
    LANDSCAPES,
    PARTS,
    PLACES_OF_PARTS,
    POSITIONS,
    SHAPES,
    SIZES,
    SIZES_OF_TWO,
    Scene,
    held_out_scene,
    random_landscape,
    random_pair,
    random_scene,
    random_single,
)
from models.pocket.recipe.style_map import StyleMap
from models.pocket.recipe.style_statistics import IN_SHADOW, fit_discriminant
from models.pocket.recipe.styles import SHADE, STYLES, styled_scene
from models.pocket.recipe.text import (
    ABSENT,
    ANSWERS,
    FACT_TOKENS,
    KEEPING,
    MAX_TOKENS,
    WIDTH,
    SaidBefore,
    build_text_encoder,
    embed,
    facts,
    places_of,
    tokens_of,
    with_stated_place,
)
from models.pocket.recipe.training import Float32Muon, Optimisers
from models.pocket.recipe.unet import build_unet
from models.pocket.recipe.upscaler import CompactUpscaler
from models.pocket.recipe.velocity import Forward, VelocityLoss, random_pictures, with_twins, words_for
from tests.support import POCKET

CELLS = 40


def test_the_object_of_a_place_is_drawn_there() -> None:
    rng, found = random.Random(3), 0
    for scene in (random_scene(rng) for _ in range(300)):
        answers = dict(zip(ANSWERS, facts(scene), strict=True))
        cover = kind_cover(scene, CELLS, CELLS)
        assert torch.allclose(cover.sum(dim=0), torch.ones(CELLS, CELLS))
        for place, (x, y) in POSITIONS.items():
            shape = ANSWERS[f"shape at {place}"][answers[f"shape at {place}"]]
            if shape == ABSENT:
                continue
            left, top = round((x - 0.2) * CELLS), round((y - 0.2) * CELLS)
            around = cover[1:, top : top + CELLS * 2 // 5, left : left + CELLS * 2 // 5].sum((1, 2))
            assert SHAPES[int(around.argmax())] == shape, scene
            found += 1
    assert found > 200


def test_the_cover_of_places_is_the_objects_own() -> None:
    rng = random.Random(4)
    for scene in (random_pair(rng) for _ in range(50)):
        shapes, places = kind_cover(scene, CELLS, CELLS), place_cover(scene, CELLS, CELLS)
        assert torch.equal(shapes[0], places[0])
        assert {place for place, _ in places_of(scene)} == {
            place for place, cover in zip(POSITIONS, places[1:], strict=True) if cover.any()
        }


def test_the_facts_name_each_part_of_a_landscape_at_the_place_where_it_is_drawn() -> None:
    rng = random.Random(5)
    for scene in (random_landscape(rng) for _ in range(60)):
        answers = {q: ANSWERS[q][a] for (q, a) in zip(ANSWERS, facts(scene), strict=True) if a >= 0}
        kinds, places = kind_cover(scene, CELLS, CELLS), place_cover(scene, CELLS, CELLS)
        assert torch.equal(kinds[0], places[0])
        highest: dict[str, int] = {}
        for part, colour in zip(LANDSCAPES[scene.landscape or ""], scene.parts, strict=True):
            place = PLACES_OF_PARTS[part]
            assert (answers[f"part at {place}"], answers[f"colour at {place}"]) == (part, colour)
            cover = places[1 + tuple(POSITIONS).index(place)]
            assert torch.equal(cover, kinds[1 + len(SHAPES) + PARTS.index(part)])
            highest[place] = int(cover.sum(dim=1).nonzero()[0])
        assert sorted(highest, key=lambda place: highest[place]) == sorted(
            highest, key=lambda place: POSITIONS[place][1]
        )


@pytest.mark.soak
def test_two_objects_never_touch() -> None:
    rng = random.Random(9)
    for scene in (random_pair(rng) for _ in range(300)):
        there, around = (kind_cover(replace(scene, things=(thing,)), 128, 128)[0] < 1 for thing in scene.things)
        wider = torch.nn.functional.max_pool2d(around[None].float(), 5, stride=1, padding=2)[0] > 0
        assert there.any()
        assert not (there & wider).any(), scene


def test_latents_cached_of_another_world_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.pocket.recipe.latents.WORK", tmp_path)
    vae = AutoencoderTiny(
        latent_channels=8, encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8)
    )
    phase = Phase("trial", ((64, 64),), pictures=3, steps=1, batch=2, rate=1e-3, middle=0.0)
    first = cached_latents(vae, Plan(), phase, (64, 64))
    kept = set(tmp_path.iterdir())
    assert torch.equal(cached_latents(vae, Plan(), phase, (64, 64)), first)
    assert set(tmp_path.iterdir()) == kept
    monkeypatch.setitem(SIZES, "small", 0.2)
    monkeypatch.setitem(SIZES, "medium", 0.3)
    monkeypatch.setitem(SIZES_OF_TWO, "medium", 0.2)
    assert not torch.equal(cached_latents(vae, Plan(), phase, (64, 64)), first)
    assert len(set(tmp_path.iterdir())) == 2


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_discriminant_names_drawn_pictures() -> None:
    """What it is fitted for: no model can be distinguished better than the drawings it learned from."""
    discriminant, rng = fit_discriminant(), random.Random(99)
    for name in ("base", *STYLES):
        right = 0
        for i in range(20):
            scene = random_landscape(rng) if i % 5 == 4 else held_out_scene(rng, 1 + i % 2)
            picture = draw_scene(scene, 256, 256) if name == "base" else styled_scene(scene, name, 256, 256, rng)
            right += discriminant.classify(picture) == name
        assert right >= 19, name


def test_the_autoencoder_can_draw_a_shadow_on_every_background() -> None:
    """As a band, as shadows are: what it draws right as a square it may still draw grey there."""
    vae = AutoencoderTiny.from_pretrained(POCKET / "vae").float()
    band = np.abs(np.subtract.outer(np.arange(256), np.arange(256))) < 20
    middle = np.arange(60, 200)
    for behind in COLOURS:
        shaded = np.where(band[:, :, None], SHADE, np.asarray(draw_scene(Scene(behind), 256, 256))).astype(np.float32)
        with torch.no_grad():
            inputs = torch.from_numpy(shaded.transpose(2, 0, 1))[None] / 127.5 - 1
            latents = vae.encode(inputs, return_dict=False)[0]  # type: ignore[arg-type]
            seen = vae.decode(latents, return_dict=False)[0]  # type: ignore[arg-type]
        decoded = ((seen[0].numpy().transpose(1, 2, 0) + 1) * 127.5).clip(0, 255)
        apart = np.linalg.norm(lab_of(decoded)[middle, middle] - lab_of(SHADE[None, None])[0, 0], axis=1)
        assert apart.mean() < IN_SHADOW, behind


def test_the_cover_of_colours_names_objects_and_background() -> None:
    rng = random.Random(6)
    names = tuple(COLOURS)
    for scene in (random_pair(rng) for _ in range(50)):
        colours, places = colour_cover(scene, CELLS, CELLS), place_cover(scene, CELLS, CELLS)
        assert (colours[names.index(scene.background)][places[0] == 1] == 1).all()
        for place, thing in places_of(scene):
            whole = places[1 + tuple(POSITIONS).index(place)] == 1
            assert whole.any()
            assert (colours[names.index(thing.colour)][whole] == 1).all()


def test_the_cover_of_colours_names_a_landscapes_parts_shaded_ones_too() -> None:
    rng = random.Random(10)
    names = tuple(COLOURS)
    for scene in (random_landscape(rng) for _ in range(60)):
        colours, focus = colour_cover(scene, CELLS, CELLS), focus_on_objects(scene, CELLS, CELLS)
        assert torch.allclose(colours.sum(dim=0), torch.ones(CELLS, CELLS))
        sky, *parts = (colours[names.index(colour)] for colour in (scene.background, *scene.parts))
        assert (sky[0, [0, -1]] == 1).all()
        assert all((part == 1).any() for part in parts), scene
        if scene.landscape in ("hills", "house", "boat", "tree"):
            assert (parts[-1][-1] == 1).all(), scene  # the ground, from one side to the other, in the shade or not
        assert focus.mean().item() == pytest.approx(1.0, abs=1e-5)
        assert all(focus[part == 1].min() > focus[0, 0] == focus.min() for part in parts)


def test_each_object_counts_as_much_in_the_loss_whatever_its_size() -> None:
    rng = random.Random(8)
    for scene in (random_pair(rng) for _ in range(50)):
        focus, cover = focus_on_objects(scene, CELLS, CELLS), place_cover(scene, CELLS, CELLS)
        assert focus.mean().item() == pytest.approx(1.0, abs=1e-5)
        assert focus[cover[0] == 1].min() == focus.min() < focus[cover[0] == 0].min()
        across = scene.relation not in ("above", "below")
        halves = (focus - focus.min()).split(CELLS // 2, dim=1 if across else 0)
        assert halves[0].sum().item() == pytest.approx(halves[1].sum().item(), rel=0.1)


@pytest.mark.soak
def test_an_adopted_text_goes_on_saying_what_it_said() -> None:
    """While it learns to say other things of landscapes: without `SaidBefore` it drifts ten times as far."""
    tokenizer = CLIPTokenizer.from_pretrained(POCKET / "tokenizer")
    rng = random.Random(3)
    objects, unseen, landscapes = (
        tokens_of(tokenizer, [plain_caption(draw(rng)) for _ in range(16)])
        for draw in (random_pair, random_pair, random_landscape)
    )

    def drift(keeping: float) -> float:
        torch.manual_seed(0)
        encoder, pooling = CLIPTextModel.from_pretrained(POCKET / "text_encoder"), build_unet().add_embedding
        before, wanted = SaidBefore(encoder, pooling), torch.randn(WIDTH)
        optimiser = torch.optim.Adam(encoder.parameters(), lr=3e-4)
        for _ in range(30):
            other = functional.mse_loss(embed(encoder, pooling, landscapes)[0][:, -2], wanted.expand(16, -1))
            loss = other + keeping * before.change(objects, objects, *embed(encoder, pooling, objects))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            return before.change(unseen, unseen, *embed(encoder, pooling, unseen)).item()

    assert drift(KEEPING) < 0.1 * drift(0)


def test_an_object_without_a_stated_place_is_in_the_center_and_said_to_be() -> None:
    rng = random.Random(4)
    singles = [random_single(rng) for _ in range(80)]
    unplaced = [scene for scene in singles if scene.things[0].position is None]
    assert unplaced
    for scene in unplaced:
        (thing,) = scene.things
        assert (thing.x, thing.y) == pytest.approx(POSITIONS["center"], abs=0.07)
        placed = with_stated_place(scene)
        assert placed.things[0].position == "center"
        assert "center" in plain_caption(placed)
        assert "center" not in plain_caption(scene)
        assert facts(scene) == facts(placed)
        assert torch.equal(place_cover(scene, CELLS, CELLS), place_cover(placed, CELLS, CELLS))


@pytest.mark.soak
def test_an_adopted_text_learns_to_say_of_an_unstated_place_what_it_said_of_the_stated_one() -> None:
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(POCKET / "tokenizer")
    encoder, pooling = build_text_encoder(tokenizer), build_unet().add_embedding
    unplaced = tokens_of(tokenizer, ["a red star on a white background"])
    placed = tokens_of(tokenizer, ["a red star in the center on a white background"])
    before = SaidBefore(encoder, pooling)
    with torch.no_grad():
        (words, pooled), (of_placed, _) = embed(encoder, pooling, unplaced), embed(encoder, pooling, placed)
        wanted = torch.cat([words[:, :-FACT_TOKENS], of_placed[:, -FACT_TOKENS:]], dim=1)
        assert before.change(unplaced, unplaced, words, pooled).item() == pytest.approx(0.0, abs=1e-9)
        assert before.change(unplaced, placed, wanted, pooling(wanted)).item() == pytest.approx(0.0, abs=1e-9)
        assert before.change(unplaced, placed, words, pooled).item() > 1e-4


def test_no_caption_of_one_object_reaches_the_fact_tokens() -> None:
    """What they say of one caption can then be what they say of the same with a place.

    See `SaidBefore.change`.
    """
    tokenizer = CLIPTokenizer.from_pretrained(POCKET / "tokenizer")
    rng = random.Random(5)
    longest = max(len(tokenizer(full_caption(random_single(rng), rng)).input_ids) for _ in range(2000))
    assert longest <= MAX_TOKENS - FACT_TOKENS


@pytest.mark.soak
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
    chosen = random_pictures(rng, 1000, 10)
    words = words_for(rng, [random_pair(rng) for _ in chosen], 10)
    assert len(chosen) == 8
    assert all(words[:8])
    assert words[8:] == [""] * 2

    conditional = torch.tensor([0.1] * 8 + [-0.1] * 2).view(10, 1, 1, 1)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(noisy: torch.Tensor, timesteps: torch.Tensor, words: torch.Tensor, **_: bool) -> tuple[torch.Tensor]:
        seen.append((noisy, timesteps))
        return (words.expand_as(noisy),)

    latents = with_twins(torch.randn(8, 8, 4, 4), 10)

    def loss(words: torch.Tensor, middle: float) -> float:
        torch.manual_seed(0)
        return VelocityLoss(torch.device("cpu"))(forward, latents, words, middle).item()

    assert loss(conditional, -9.0) > loss(0 * conditional, -9.0) + 0.1
    assert loss(conditional, 9.0) < loss(0 * conditional, 9.0) + 0.1
    for noisy, timesteps in seen:
        assert torch.equal(noisy[8:], noisy[:2])
        assert torch.equal(timesteps[8:], timesteps[:2])


@pytest.mark.soak
def test_at_much_noise_the_twin_without_words_comes_half_of_the_way() -> None:
    """Every row says one number: with words 1, and without them what is least wrong.

    That is so as the pictures' own mean is nought.
    """
    latents = with_twins(torch.randn(80, 8, 16, 16), 100)
    said = torch.cat([torch.ones(80), torch.zeros(20)]).view(100, 1, 1, 1)

    def slope(said: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        said = said.detach().requires_grad_()
        loss = VelocityLoss(torch.device("cpu"))(lambda noisy, *_, **__: (said.expand_as(noisy),), latents, said, 9.0)
        return torch.autograd.grad(loss, said)[0]

    for _ in range(40):
        said[80:] -= 2 * slope(said)[80:]
    assert 0.4 < said[80:].median().item() < 0.6


def test_agreement_teaches_only_the_twin_without_words() -> None:
    latents = with_twins(torch.randn(8, 8, 4, 4), 10)

    def pull(unconditional: float) -> torch.Tensor:
        """Return the loss's gradient by row.

        The twins without words predict `unconditional`, and everyone else nought.
        """
        torch.manual_seed(0)
        said = torch.tensor([0.0] * 8 + [unconditional] * 2).view(10, 1, 1, 1).requires_grad_()
        VelocityLoss(torch.device("cpu"))(
            lambda noisy, *_, **__: (said.expand_as(noisy),), latents, said, -9.0
        ).backward()
        assert said.grad is not None
        return said.grad.flatten()

    agreeing, disputing = pull(0.0), pull(1.0)
    assert torch.equal(agreeing[:8], disputing[:8])
    assert (disputing[8:] > agreeing[8:] + 0.1).all()


def test_the_focus_counts_where_the_layout_is_decided() -> None:
    latents, focus = torch.randn(10, 8, 4, 4), torch.ones(10, 4, 4)
    focus[:, :, :2], focus[:, :, 2:] = 2.0, 0.0

    def loss(middle: float, focus: torch.Tensor | None) -> float:
        def forward(noisy: torch.Tensor, *_: torch.Tensor, **__: bool) -> tuple[torch.Tensor]:
            return (torch.cat([torch.full_like(noisy[..., :2], 5.0), torch.zeros_like(noisy[..., 2:])], dim=3),)

        torch.manual_seed(0)
        return VelocityLoss(torch.device("cpu"))(forward, latents, latents, middle, focus).item()

    little, much = (loss(middle, focus) / loss(middle, None) - 1 for middle in (-0.5, 9.0))
    assert little > 0.2
    assert much < little / 2  # a fifth of the noise levels is spread evenly, whatever the middle


def _says(conditional: float, unconditional: float) -> Forward:
    """A model that predicts the first with words, and the second without."""

    def forward(noisy: torch.Tensor, *_: torch.Tensor, **__: bool) -> tuple[torch.Tensor]:
        half = torch.ones_like(noisy[: len(noisy) // 2])
        return (torch.cat([conditional * half, unconditional * half]),)

    return forward


@pytest.mark.parametrize(
    ("timestep", "wanted"), [(0, 1.0), (SETTLED, 1.0), ((SETTLED + OPEN) // 2, 0.5), (OPEN, 0.0), (999, 0.0)]
)
def test_words_change_nothing_where_the_picture_is_decided(timestep: int, wanted: float) -> None:
    """The student is to say what its teacher says with words.

    Without words it comes so much of the way from 0 to 1.
    """
    loss = AgreementLoss(_says(1.0, 0.0), torch.device("cpu"))
    latents, focus, timesteps = torch.randn(2, 8, 4, 4), torch.ones(2, 4, 4), torch.full((2,), timestep)

    def of(conditional: float, unconditional: float) -> float:
        return loss(_says(conditional, unconditional), latents, timesteps, latents, focus).item()

    assert of(1.0, wanted) == pytest.approx(0.0, abs=1e-6)
    assert all(
        of(conditional, unconditional) > 0.01
        for conditional, unconditional in ((0.9, wanted), (1.0, wanted + 0.1), (1.0, wanted - 0.1))
    )


def test_agreement_draws_most_of_its_noise_levels_where_it_has_work() -> None:
    timesteps = early_timesteps(4000)
    assert timesteps.min() >= 0
    assert timesteps.max() <= 999
    assert (timesteps < OPEN).float().mean().item() == pytest.approx(EARLY_SHARE, abs=0.01)


@pytest.mark.soak
def test_a_unet_learns_to_agree() -> None:
    """A few steps lessen what words change at t = 300, in new pictures and under new noise."""
    torch.manual_seed(0)
    unet = build_unet().to(memory_format=torch.channels_last)  # type: ignore[call-arg]
    before, embeddings = copy.deepcopy(unet), torch.randn(6, MAX_TOKENS, WIDTH)
    timesteps, focus, unseen = torch.full((3,), 300), torch.ones(3, 16, 16), torch.randn(3, 8, 16, 16)

    def changed_by_words(model: Forward) -> float:
        with torch.no_grad():
            conditional, unconditional = model(
                unseen.repeat(2, 1, 1, 1), timesteps.repeat(2), embeddings, return_dict=False
            )[0].chunk(2)
        return (conditional - unconditional).square().mean().item()

    loss, parameters = AgreementLoss(before, torch.device("cpu")), list(unet.parameters())
    optimisers = Optimisers(unet, ("conv_in", "conv_out"))
    for _ in range(8):
        loss_now = loss(unet, torch.randn_like(unseen), timesteps, embeddings, focus)
        optimisers.descend(loss_now, parameters, 1e-3)
    assert changed_by_words(unet) < 0.5 * changed_by_words(before)


def test_what_a_style_changes_weighs_half_of_its_loss() -> None:
    plain = torch.randn(3, 8, 20, 20)
    styled = plain.clone()
    styled[0, :, 5:7, 4:14] += 1.0  # a shadow, of a twentieth of the cells
    styled[1] += torch.randn(8, 1, 1)  # a tint
    focus = focus_on_style(styled, plain)
    assert focus[0, 5:7, 4:14].sum().item() == pytest.approx(0.525 * 400, rel=1e-3)
    assert focus[0].sum().item() == pytest.approx(400, rel=1e-3)
    assert torch.allclose(focus[1], torch.ones(20, 20), atol=1e-3)
    assert (focus[2] == 0.5).all()  # nothing changed: no cell before the others


def test_a_styles_map_predicts_what_a_difference_becomes() -> None:
    """The style repeats every two cells.

    It has dots that hide what is below, and between them colours turned and halved.
    """
    torch.manual_seed(0)
    plain = torch.randn(60, 8, 16, 16)
    mixing = torch.linalg.qr(torch.randn(8, 8))[0] / 2

    def styled(latents: torch.Tensor) -> torch.Tensor:
        shown = torch.einsum("nihw,io->nohw", latents, mixing)
        shown[:, :, ::2, ::2] = 3.0
        return shown

    style_map = StyleMap(plain, styled(plain))
    one, other = torch.randn(2, 2, 8, 16, 16)
    assert style_map.explained > 0.99
    assert torch.allclose(style_map(one - other), styled(one) - styled(other), atol=0.02)
    assert StyleMap(plain, torch.randn_like(plain)).explained < 0.1
    elsewhere = StyleMap(plain, styled(plain), "meta")  # cached latents lie on the CPU, wherever the training is
    assert elsewhere(torch.empty(1, 8, 16, 16, device="meta")).device.type == "meta"


@pytest.fixture
def style_loss() -> Callable[..., float]:
    """Return the loss of a styled UNet, which adds what the words are so many times, by cell.

    The base adds it once.
    """
    torch.manual_seed(7)
    rows, drawn = 100, torch.randn(60, 8, 8, 8)
    plain, embeddings = with_twins(torch.randn(80, 8, 8, 8), rows), torch.randn(rows, 1, 1)
    halved, unknown = 0.5 * plain, torch.cat([plain[..., :4], torch.randn_like(plain[..., 4:])], 3)
    styles = {
        "linear": (halved, StyleMap(drawn, 0.5 * drawn)),
        "not linear, the left half as it was": (unknown, StyleMap(drawn, torch.randn_like(drawn))),
    }

    def hearing(times: torch.Tensor) -> Forward:
        def forward(
            noisy: torch.Tensor, _: torch.Tensor, embeddings: torch.Tensor, **__: object
        ) -> tuple[torch.Tensor]:
            return (0.5 * noisy + times * embeddings.mean((1, 2))[:, None, None, None],)

        return forward

    def loss(style: str, middle: float, left: float, right: float) -> float:
        torch.manual_seed(1)
        styled, style_map = styles[style]
        measured = StyleLoss(hearing(torch.ones(8)), style_map, torch.device("cpu"))
        times = torch.tensor([left] * 4 + [right] * 4)
        return measured(hearing(times), styled, plain, embeddings, middle, torch.ones(rows, 8, 8)).item()

    return loss


@pytest.mark.parametrize("middle", [-9.0, 9.0], ids=["little noise", "much noise"])
def test_words_change_under_a_linear_style_what_they_change_without_it(
    style_loss: Callable[..., float], middle: float
) -> None:
    assert min((0.0, 0.25, 0.5, 0.75, 1.0), key=lambda times: style_loss("linear", middle, times, times)) == 0.5


def test_words_change_under_another_style_only_what_it_leaves_as_it_was(style_loss: Callable[..., float]) -> None:
    style = "not linear, the left half as it was"
    choices = [(left, right) for left in (0.0, 1.0) for right in (0.0, 1.0)]
    assert min(choices, key=lambda halves: style_loss(style, -9.0, *halves)) == (1.0, 0.0)
    decided, open_to_words = (
        style_loss(style, middle, 1.0, 1.0) - style_loss(style, middle, 1.0, 0.0) for middle in (-9.0, 9.0)
    )
    assert decided > 4 * open_to_words


def test_a_lora_goes_on_from_its_published_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unet, other = build_unet(), build_unet()
    for model in (unet, other):
        model.add_adapter(lora_config(4), adapter_name="style")
    for name, value in unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    export_lora("style", unet, 4, tmp_path)
    set_peft_model_state_dict(other, published_lora("style", tmp_path), adapter_name="style")
    adapters = [
        {name: value.half() for name, value in model.named_parameters() if "lora_" in name} for model in (unet, other)
    ]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())


def test_a_lora_is_loaded_with_the_strength_that_it_was_exported_with(tmp_path: Path) -> None:
    unet, other = build_unet(), build_unet()
    unet.add_adapter(lora_config(4), adapter_name=ADAPTER)
    export_lora("style", unet, 4, tmp_path, strength=1.25)
    loader: Any = StableDiffusionPipeline
    state, alphas, metadata = loader.lora_state_dict(tmp_path / "style.safetensors", return_lora_metadata=True)
    loader.load_lora_into_unet(state, alphas, other, "style", metadata=metadata)
    assert {module.scaling["style"] for module in other.modules() if isinstance(module, LoraLayer)} == {1.25}


def test_muon_in_float32_steps_as_torchs_own_does() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((24, 90), (40, 16))]
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    before = [weight.detach().clone() for weight in weights]
    kinds = (torch.optim.Muon, weights), (Float32Muon, copies)
    optimisers = [kind(of, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw") for kind, of in kinds]
    for _ in range(5):
        for weight, copied in zip(weights, copies, strict=True):
            weight.grad = torch.randn_like(weight)
            copied.grad = weight.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for weight, copied, start in zip(weights, copies, before, strict=True):
        assert (weight - copied).norm() < 0.05 * (weight - start).norm()  # of bfloat16


def test_a_phases_noise_moves_to_where_it_ends() -> None:
    still = Phase("still", ((64, 64),), pictures=3, steps=200, batch=2, rate=1e-3, middle=0.5)
    assert still.middle_at(0) == still.middle_at(199) == 0.5
    falling = replace(still, last_middle=-0.5)
    assert (falling.middle_at(0), falling.middle_at(100), falling.middle_at(200)) == (0.5, 0.0, -0.5)


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
