"""Runs that begin from an image end where diffusers' img2img and inpainting pipelines do, alone and in any company."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image

from serve_app.domain.errors import FailureCode
from serve_app.domain.families import UNET_SAMPLERS as SAMPLERS
from serve_app.engine import Engine, RunRequest
from serve_app.engine.families.autoencoder import begun
from tests.engine.conftest import WIDE_FLOAT32
from tests.engine.diffusers_reference import DiffusersReference
from tests.engine.run_engine import final_latents, finish, load
from tests.engine.tiny_transformers import ANIMA, FLUX1, KREA_2, QWEN_IMAGE21, Z_IMAGE, TinyTransformer

TOLERANCE = 1e-4
STRENGTHS = (0.2, 0.5, 0.9)
IMAGE = np.random.RandomState(0).randint(0, 256, (64, 64, 3), np.uint8)
MASK = np.zeros((64, 64), np.uint8)
MASK[10:50, 30:] = 255
REQUEST = RunRequest(
    run_id="r", prompt="a red cat", negative_prompt="dull", seed=3, steps=10, guidance=4.0, width=64, height=64,
    image=IMAGE,
)  # fmt: skip


@pytest.fixture(scope="module")
def z_image(written: Callable[[TinyTransformer, str], Path]) -> Path:
    """Z-Image, whose schedule depends on the size."""
    return written(Z_IMAGE, "base")


def as_diffusers_has_it(family: str, request: RunRequest) -> RunRequest:
    """Return a request with the guidance of diffusers' pipeline, which counts Z-Image's from 0."""
    return replace(request, guidance=request.guidance - (family == "z_image"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sdxl", "z_image", "flux1", "krea2", "anima", "qwen_image21"])
def test_an_image_and_a_mask_end_where_diffusers_does(family: str, request: pytest.FixtureRequest) -> None:
    """All are in one batch here, beside one without an image, and one at a time in the pipelines.

    diffusers' Anima takes no mask. Its Krea 2 and Qwen-Image 2.1 begin from latents that its scheduler has noised.
    """
    folder: Path = request.getfixturevalue(family)
    requests = [
        replace(REQUEST, run_id=f"{strength} {mask is not None}", steps=5, strength=strength, mask=mask)
        for strength, mask in product((*STRENGTHS, 1.0), (None, MASK) if family != "anima" else (None,))
    ]
    if family in ("sd", "sdxl"):
        remembering, twice = replace(REQUEST, sampler="dpm++2m"), replace(REQUEST, sampler="heun")
        drawing = replace(REQUEST, sampler="euler-a", mask=MASK)
        requests += [replace(each, run_id=str(each.sampler), strength=0.5) for each in (remembering, twice, drawing)]
    requests += [replace(REQUEST, run_id="noise", image=None), replace(REQUEST, run_id="odd", steps=7, strength=0.5)]
    partly = [
        replace(requests[i], guidance_start=0.2, guidance_end=0.6) for i in (1, 4, 5, 9) if i < len(requests)
    ]  # of the steps that are left
    requests += [replace(each, run_id=f"{each.run_id}, partly") for each in partly]
    model = load(folder, WIDE_FLOAT32)
    own = {"flux1": FLUX1, "krea2": KREA_2, "anima": ANIMA, "qwen_image21": QWEN_IMAGE21}.get(family)
    reference = (own.reference if own else DiffusersReference)(folder)
    made = final_latents(model, requests)
    for one in requests:
        expected = reference.latents(as_diffusers_has_it(family, one))
        assert (made[one.run_id] - expected).abs().max() < TOLERANCE, one.run_id


@pytest.mark.soak
@pytest.mark.parametrize("mask", [None, MASK], ids=["image", "mask"])
def test_every_sampler_begins_late_as_diffusers_does(
    sd: Path, mask: np.ndarray | None, pytestconfig: pytest.Config
) -> None:
    requests = [
        replace(REQUEST, run_id=f"{sampler} {strength}", sampler=sampler, mask=mask, strength=strength, guidance=2.0)
        for sampler, strength in product(SAMPLERS, STRENGTHS)
    ]
    model, reference = load(sd, WIDE_FLOAT32), DiffusersReference(sd)
    differences: dict[str, float] = {}
    for one in requests:
        (made,), expected = final_latents(model, [one]).values(), reference.latents(one)
        differences[one.run_id] = float((made - expected).abs().max() / expected.abs().max().clamp(min=1))
    worst = max(differences.items(), key=lambda each: each[1])
    pytestconfig.get_terminal_writer().line(f"\n{len(requests)} runs, largest difference {worst}")
    assert worst[1] < TOLERANCE, {name: each for name, each in differences.items() if each >= TOLERANCE}


def test_a_large_picture_that_is_looked_at_is_reduced_and_cut_as_diffusers_does() -> None:
    picture = Image.fromarray(np.random.RandomState(0).randint(0, 256, (1100, 1300, 3), np.uint8))
    diffusers: Any = Flux2ImageProcessor()
    reduced = diffusers._resize_to_target_area(picture, 1024 * 1024)
    width, height = (side // 16 * 16 for side in reduced.size)
    expected = diffusers.preprocess(reduced, height=height, width=width, resize_mode="crop")
    looked_at, _ = begun(picture, None, 64, 64, is_seen=True)
    assert looked_at is not None
    assert np.array_equal(looked_at, ((expected[0] + 1) / 2 * 255).round().permute(1, 2, 0))


def test_a_run_that_begins_late_counts_the_steps_that_it_makes(engine: Engine) -> None:
    counted: list[tuple[int, int]] = []
    (image,) = engine.generate(
        "a cat", steps=10, strength=0.5, width=64, height=64, image=Image.fromarray(IMAGE),
        on_progress=lambda done, total: counted.append((done, total)),
    )  # fmt: skip
    assert np.asarray(image).shape == (64, 64, 3)
    assert counted[-1] == (5, 5)
    assert sorted({done for done, total in counted if done and total == 5}) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strength": 0.0}, "strength: must be above 0 and at most 1, not 0.0"),
        ({"strength": 1.5}, "strength: must be above 0 and at most 1, not 1.5"),
        ({"strength": 0.05}, "strength: leaves none of 10 steps to draw"),
        ({"image": IMAGE[:32]}, r"image: must be uint8 [64, 64, 3] for an image of this size"),
        ({"mask": IMAGE}, r"mask: must be uint8 [64, 64] for an image of this size"),
        ({"image": None, "mask": MASK}, "mask: says which part of an image is redrawn"),
    ],
)
def test_what_nobody_can_begin_from_is_refused_by_name(engine: Engine, wrong: dict[str, Any], message: str) -> None:
    failure = finish(engine, [replace(REQUEST, **wrong)])["r"].failure
    assert failure is not None
    assert failure.code is FailureCode.GENERATION_FAILED
    assert failure.message.startswith(message)
