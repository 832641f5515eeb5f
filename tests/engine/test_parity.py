"""The engine's latents are those of diffusers' own pipelines, whatever the batch."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_app.domain.families import UNET_SAMPLERS as SAMPLERS
from serve_app.domain.samplers import Sampler
from serve_app.engine import AdapterFile, Engine, RunRequest, as_one
from serve_app.engine.base_model import BaseModel
from serve_app.engine.run import Run
from tests.engine import tiny_models
from tests.engine.conftest import WIDE_FLOAT32
from tests.engine.diffusers_reference import DiffusersReference
from tests.engine.run_engine import final_latents, finish, load, start
from tests.engine.test_sampler import SPACINGS, STEPS

pytestmark = pytest.mark.xdist_group("parity")  # so that one process opens the models and the pipelines
TOLERANCE = 1e-4
WEIGHTS = (0.1, 1.0)
TOGETHER = ((1.5, -0.6), (-1.0, 0.0, 0.7), (0.5, 2.0, -0.8, 0.75))
"""Weights of two, three and four LoRAs that act as one."""
PARTS = ((0.0, 1.0), (0.0, 0.5), (0.3, 1.0), (0.25, 0.7), (0.4, 0.45))
"""Where guidance acts; the last covers none of a few steps."""


Opened = tuple[BaseModel, DiffusersReference]


@pytest.fixture(scope="module")
def opened() -> Callable[[Path], Opened]:
    """Return what opens a folder once for all tests: a model measures which batches keep its bits, which takes 1 s."""
    return cache(lambda folder: (load(folder, WIDE_FLOAT32), DiffusersReference(folder)))


def batched(runs: Sequence[Run], size: int) -> Iterator[Sequence[Run]]:
    for first in range(0, len(runs), size):
        yield runs[first : first + size]


def adapters(folder: Path, into: Path) -> list[AdapterFile]:
    """Write adapters of three ranks.

    One has attention only, one every layer with convolutions, one attention and text encoders under kohya's names.
    """
    whole = tiny_models.random_lora(folder, rank=8, seed=2, targets=tiny_models.EVERYTHING)
    texts = tiny_models.random_lora(folder, rank=6, seed=3, text=True)
    encoders = (
        {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
        if (folder / "text_encoder_2").is_dir()
        else {"text_encoder": "lora_te"}
    )
    prefixes = {"unet": "lora_unet", **encoders}
    return [
        tiny_models.write_lora(into / "plain.safetensors", folder, rank=4, seed=1),
        tiny_models.write_adapter(
            into / "whole.safetensors",
            whole,
            {"unet.r": 8, "unet.lora_alpha": 4, "unet.target_modules": list(tiny_models.EVERYTHING)},
        ),
        tiny_models.write_adapter(
            into / "texts.safetensors", tiny_models.kohya_names(texts, alpha=3.0, prefixes=prefixes)
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sd2", "sdxl"])
def test_a_mixed_batch_makes_the_latents_of_diffusers_one_at_a_time(
    family: str, opened: Callable[[Path], Opened], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(family)
    files = [
        *adapters(folder, tmp_path),
        tiny_models.write_lora(tmp_path / "fourth.safetensors", folder, rank=5, seed=8),
    ]
    alone = [(file, weight) for file, weight in product([*files[:3], None], WEIGHTS)]
    composed = [as_one(zip(files, weights, strict=False)) for weights in TOGETHER]
    requests = [
        RunRequest(run_id=f"{i}", prompt=f"a red cat {i}", negative_prompt="dull" if i % 2 else "",
                   adapter=adapter, scale=scale, seed=2**32 - 1 - i, steps=2 + i % 3, guidance=3.0 + i % 4, width=64,
                   height=64, guidance_start=PARTS[i % 5][0], guidance_end=PARTS[i % 5][1])
        for i, (adapter, scale) in enumerate([*alone, *composed])
    ]  # fmt: skip
    model, reference = opened(folder)
    made = final_latents(model, requests)
    for one in requests:
        expected = reference.latents(one)
        assert (made[one.run_id] - expected).abs().max() < TOLERANCE * max(1, expected.abs().max()), one


@pytest.mark.slow
def test_adapters_change_what_is_made(opened: Callable[[Path], Opened], sd: Path, tmp_path: Path) -> None:
    """Guards the test above: an adapter that did nothing would pass it."""
    model, _ = opened(sd)
    requests = [
        RunRequest(run_id=f"{i}", prompt="a cat", adapter=file, steps=4, width=64, height=64)
        for i, file in enumerate([None, *adapters(sd, tmp_path)])
    ]
    made = final_latents(model, requests)
    assert all((made["0"] - made[str(i)]).abs().max() > 100 * TOLERANCE for i in (1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sampler"),
    [*product(["sd"], SAMPLERS), ("sd2", Sampler.DPMPP_2M), ("sdxl", Sampler.EULER), ("lcm", None)],
)
def test_every_sampler_and_guidance_ends_where_diffusers_does(
    family: str, sampler: Sampler | None, opened: Callable[[Path], Opened], request: pytest.FixtureRequest
) -> None:
    requests = [
        RunRequest(run_id=f"{steps}-{guidance}", prompt="a cat", seed=steps, steps=steps, guidance=guidance,
                   width=64, height=64, sampler=sampler)
        for steps, guidance in [(2, 1.0), (5, 1.5 if sampler is Sampler.LCM else 7.5)]
    ]  # fmt: skip
    model, reference = opened(request.getfixturevalue(family))
    part = replace(requests[1], run_id="part", guidance_start=0.3, guidance_end=0.9)
    if family == "lcm":
        with pytest.raises(ValueError, match="guidance_start: this base model is told"):
            start(model, part)
    else:
        requests.append(part)
    made = final_latents(model, requests)
    for one in requests:
        expected = reference.latents(one)
        assert (made[one.run_id] - expected).abs().max() < TOLERANCE * max(1, expected.abs().max()), one


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(64, 64), (96, 64), (64, 96)])
def test_every_latent_shape_gives_the_image_of_diffusers(engine: Engine, sd: Path, width: int, height: int) -> None:
    one = RunRequest(run_id="k", prompt="a blue dog", seed=7, steps=3, width=width, height=height)
    image = finish(engine, [one])["k"].image
    expected = DiffusersReference(sd).image(one)
    assert image is not None
    assert image.shape == (height, width, 3)
    assert abs(image.astype(int) - expected).max() <= 1  # rounding to 8 bits


@pytest.mark.soak
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_every_sampler_spacing_and_step_count_is_the_pipeline_at_every_pass(
    prediction: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """All runs are in one batch here, and one at a time in the pipeline."""
    folder = tiny_models.write_sd(tmp_path, prediction=prediction)
    model, reference = load(folder, WIDE_FLOAT32), DiffusersReference(folder)
    names = [sampler if spacing is None else f"{sampler}-{spacing}" for spacing in SPACINGS for sampler in SAMPLERS]
    runs: list[Run] = []
    for name, steps in product(names, STEPS):
        one = RunRequest(
            run_id=f"{name} {steps}", prompt="a cat", seed=steps, steps=steps, guidance=2.0,
            width=64, height=64, sampler=name,
        )  # fmt: skip
        with contextlib.suppress(ValueError):  # diffusers' class has no such spacing or prediction
            runs.append(start(model, one))
    traces: dict[str, list[Tensor]] = {run.request.run_id: [] for run in runs}
    with torch.inference_mode():
        while live := [run for run in runs if not run.is_done]:
            for batch in batched(live, WIDE_FLOAT32.max_rows // 2):
                model.runner.denoise(batch)
            for run in live:
                traces[run.request.run_id].append(run.latents)
    worst = ("", 0.0)
    for run in runs:
        reference.latents(run.request)
        name, theirs = run.request.run_id, reference.trace
        assert len(traces[name]) == len(theirs), name
        for ours, expected in zip(traces[name], theirs, strict=True):
            difference = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1))
            worst = max(worst, (name, difference), key=lambda one: one[1])
    pytestconfig.get_terminal_writer().line(f"\n{prediction}: {len(runs)} runs, largest difference {worst}")
    assert worst[1] < TOLERANCE, worst
