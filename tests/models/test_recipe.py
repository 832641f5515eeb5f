"""The recipe's facts, covers and losses say what its pictures show, and what it exports is what it trained."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from peft.tuners.lora.layer import LoraLayer
from peft.utils import set_peft_model_state_dict
from transformers.models.clip.tokenization_clip import CLIPTokenizer

from models.pocket.recipe.captions import full_caption, plain_caption
from models.pocket.recipe.drawing import draw_scene
from models.pocket.recipe.export import ADAPTER, export_lora, lora_config, published_lora
from models.pocket.recipe.latents import cached_latents
from models.pocket.recipe.layout import color_cover, kind_cover, place_cover
from models.pocket.recipe.plan import Phase, Plan
from models.pocket.recipe.scenes import (
    COLORS,
    POSITIONS,
    SHAPES,
    SIZES,
    SIZES_OF_TWO,
    held_out_scene,
    random_landscape,
    random_pair,
    random_scene,
    random_single,
)
from models.pocket.recipe.style_statistics import fit_discriminant
from models.pocket.recipe.styles import STYLES, styled_scene
from models.pocket.recipe.text import ABSENT, ANSWERS, FACT_TOKENS, MAX_TOKENS, facts, places_of, with_stated_place
from models.pocket.recipe.training import Float32Muon, Optimizers
from models.pocket.recipe.unet import build_unet
from models.pocket.recipe.velocity import VelocityLoss, random_pictures, with_twins, words_for
from serve_app.upscale.upscaler import CompactNetwork
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


def test_the_cover_of_colors_names_objects_and_background() -> None:
    rng = random.Random(6)
    names = tuple(COLORS)
    for scene in (random_pair(rng) for _ in range(50)):
        colors, places = color_cover(scene, CELLS, CELLS), place_cover(scene, CELLS, CELLS)
        assert (colors[names.index(scene.background)][places[0] == 1] == 1).all()
        for place, thing in places_of(scene):
            whole = places[1 + tuple(POSITIONS).index(place)] == 1
            assert whole.any()
            assert (colors[names.index(thing.color)][whole] == 1).all()


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


def test_no_caption_of_one_object_reaches_the_fact_tokens() -> None:
    """What they say of one caption can then be what they say of the same with a place.

    See `SaidBefore.change`.
    """
    tokenizer = CLIPTokenizer.from_pretrained(POCKET / "tokenizer")
    rng = random.Random(5)
    longest = max(len(tokenizer(full_caption(random_single(rng), rng)).input_ids) for _ in range(2000))
    assert longest <= MAX_TOKENS - FACT_TOKENS


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
    optimizers = [kind(of, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw") for kind, of in kinds]
    for _ in range(5):
        for weight, copied in zip(weights, copies, strict=True):
            weight.grad = torch.randn_like(weight)
            copied.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for weight, copied, start in zip(weights, copies, before, strict=True):
        assert (weight - copied).norm() < 0.05 * (weight - start).norm()  # of bfloat16


def test_the_optimizers_move_every_weight_and_the_upscaler_learns() -> None:
    """Muon steps flat views of the convolutions: if one were a copy, its weight would stay."""
    torch.manual_seed(0)
    model = CompactNetwork(16, 2, 2)
    with pytest.raises(ValueError, match="channels_last"):
        Optimizers(model, ("body.0.",))
    model.to("cpu", memory_format=torch.channels_last)  # type: ignore[call-overload]
    before, parameters = [value.detach().clone() for value in model.parameters()], list(model.parameters())
    optimizers = Optimizers(model, ("body.0.", f"body.{len(model.body) - 1}."))
    small = torch.rand(4, 3, 16, 16)
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bicubic")
    losses: list[float] = []
    for _ in range(30):
        loss = (model(small) - large).square().mean().sqrt()
        optimizers.descend(loss, parameters, 5e-3)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not any(torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
