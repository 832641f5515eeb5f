"""Layers attend by one operator, chosen by what it does to bits; candidates of a CPU stand for those of a card."""

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_app.engine import RunRequest, attention
from serve_app.engine.attention import OF_TORCH, Attends, Operator, choose, of_torch
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import begun_at_random, final_latents, load, same_alone

ROWS = (1, 2, 4, 8)
REQUEST = RunRequest(run_id="k", prompt="a cat", seed=3, steps=2, guidance=4.0, width=64, height=64)


def flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[0]


def unmasked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        raise NotImplementedError("no mask")
    return flash(q, k, v, bias)


def by_company(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return of_torch(q, k, v, bias) * (1 + 1e-6 * len(q))


def wrong(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return 2 * flash(q, k, v, bias)


CASES: Mapping[str, tuple[Mapping[str, Operator], str]] = {
    "sd": ({"wrong": wrong, "by company": by_company, "unmasked": unmasked, "flash": flash}, "unmasked"),
    "z_image": ({"unmasked": unmasked, "flash": flash}, "flash"),
    "klein": ({"by company": by_company, "unmasked": unmasked}, "unmasked"),
    "sdxl": ({"by company": by_company, "wrong": wrong}, OF_TORCH),
}


@pytest.mark.parametrize("folder", CASES)
def test_the_first_operator_that_keeps_a_rows_bits_is_called_in_all_places(
    folder: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    candidates, expected = CASES[folder]
    model = load(request.getfixturevalue(folder))
    before = final_latents(model, [REQUEST])["k"]
    assert choose(model.denoiser, partial(model.compute, 64), ROWS, candidates) == expected
    layers = [layer for layer in model.denoiser.modules() if isinstance(layer, Attends)]
    assert layers
    assert {layer.operator for layer in layers} == {candidates.get(expected, of_torch)}
    assert ("no operator of attention keeps" in caplog.text) == (expected == OF_TORCH)
    torch.testing.assert_close(final_latents(model, [REQUEST])["k"], before, atol=1e-4, rtol=0)
    model.close()


def test_a_model_on_a_card_has_it_chosen_at_its_load(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch's own function has one kernel, and is left alone."""
    monkeypatch.setattr(attention, "CANDIDATES", {"flash": flash})
    model = load(sd)
    assert {layer.operator for layer in model.denoiser.modules() if isinstance(layer, Attends)} == {of_torch}
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["z_image", "small_sd"])
def test_runs_keep_their_bytes_with_a_chosen_operator(
    folder: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attends, "operator", staticmethod(flash))
    chance = random.Random(5)
    requests = [
        begun_at_random(RunRequest(
            run_id=f"{i}", prompt=" ".join(["a cat"] * chance.randint(1, 3)), seed=i, steps=chance.randint(2, 4),
            guidance=chance.choice([1.0, 4.0]), width=64, height=64,
        ), chance)
        for i in range(40)
    ]  # fmt: skip
    same, widest = same_alone(request.getfixturevalue(folder), EXACT_FLOAT32, requests, chance)
    assert (same, widest > 4) == (40, True)
