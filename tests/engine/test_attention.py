"""Layers attend by one operator, chosen once; candidates of a CPU stand for those of a card."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from serve_app.engine import RunRequest, base_model
from serve_app.engine.attention import CANDIDATES, OF_TORCH, Attends, Operator, of_torch
from serve_app.engine.base_model import BaseModel
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import begun_at_random, final_latents, load, same_alone

REQUEST = RunRequest(run_id="k", prompt="a cat", seed=3, steps=2, guidance=4.0, width=64, height=64)


def flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[0]


def unmasked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        raise NotImplementedError("no mask")
    return flash(q, k, v, bias)


def wrong(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return 2 * flash(q, k, v, bias)


CASES: Mapping[str, tuple[Mapping[str, Operator], str]] = {
    "sd": ({"wrong": wrong, "unmasked": unmasked, "flash": flash}, "unmasked"),
    "z_image": ({"unmasked": unmasked, "flash": flash}, "flash"),
    "klein": ({"unmasked": unmasked}, "unmasked"),
    "sdxl": ({"wrong": wrong}, OF_TORCH),
}


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Operator]], None]:
    """Return what gives a CPU candidates; the first pass is then of a small image."""
    monkeypatch.setattr(base_model, "FIRST_SIDE", 64)
    return lambda given: monkeypatch.setitem(cast(dict[str, Any], CANDIDATES), "cpu", given)


def operators(model: BaseModel) -> set[object]:
    """Return what its layers attend by: a chosen operator, or torch's choice."""
    layers = [layer for layer in model.denoiser.modules() if isinstance(layer, Attends)]
    return {each.args[0] if isinstance(each := layer.operator, partial) else each for layer in layers}


@pytest.mark.parametrize("folder", CASES)
def test_the_first_operator_that_computes_what_torch_does_is_called_in_all_places_from_the_load_on(
    folder: str,
    candidates: Callable[[Mapping[str, Operator]], None],
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given, expected = CASES[folder]
    plain = load(request.getfixturevalue(folder))
    assert operators(plain) == {of_torch}, "a CPU leaves the choice to torch"
    latents = final_latents(plain, [REQUEST])["k"]
    candidates(given)
    model = load(request.getfixturevalue(folder))
    assert operators(model) == {given.get(expected, of_torch)}
    assert ("no operator of attention computes" in caplog.text) == (expected == OF_TORCH)
    torch.testing.assert_close(final_latents(model, [REQUEST])["k"], latents, atol=1e-4, rtol=0)
    for each in (plain, model):
        each.close()


def test_torch_chooses_for_a_shape_that_the_operator_does_not_take(
    sd: Path, candidates: Callable[[Mapping[str, Operator]], None]
) -> None:
    plain, larger = load(sd), replace(REQUEST, width=96)
    seen: set[int] = set()

    def of_some_sizes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        seen.add(q.shape[2])
        if len(seen) > sizes > 0:
            raise RuntimeError("not for this shape")
        return flash(q, k, v, bias)

    sizes = 0
    candidates({"some": of_some_sizes})
    model = load(sd)
    sizes = len(seen)
    expected = final_latents(plain, [larger])["k"]
    torch.testing.assert_close(final_latents(model, [larger])["k"], expected, atol=1e-4, rtol=0)
    assert len(seen) > sizes, "the larger image has other shapes"
    for each in (plain, model):
        each.close()


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
