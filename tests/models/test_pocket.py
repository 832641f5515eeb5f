"""The bundled model loads offline, draws what the prompt says, and has the published files."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from PIL import Image

from tests.support import POCKET

pytestmark = pytest.mark.xdist_group("pocket model")  # it is loaded once
COLORS = {
    "red": (220, 40, 40),
    "blue": (40, 80, 200),
    "green": (40, 150, 60),
    "yellow": (250, 220, 60),
    "white": (245,) * 3,
    "black": (20,) * 3,
}
SAMPLERS = (DDIMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler)


@pytest.fixture(scope="session")
def loaded_pipeline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        loaded = DiffusionPipeline.from_pretrained(POCKET, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture
def pipeline(loaded_pipeline: Any) -> Iterator[Any]:
    """Return the pipeline, loaded once; a test may replace its scheduler."""
    published = loaded_pipeline.scheduler
    yield loaded_pipeline
    loaded_pipeline.scheduler = published


def picture_of(pipeline: Any, prompt: str, *, steps: int = 12, width: int = 512, height: int = 512) -> Image.Image:
    generator = torch.Generator().manual_seed(1)
    result = pipeline(prompt, generator=generator, num_inference_steps=steps, width=width, height=height)
    return result.images[0]


def assert_shows(picture: Image.Image, color: str, background: str) -> None:
    """Assert that an object of the color stands about the center, and the background is all else."""
    pixels = np.asarray(picture.resize((64, 64)), dtype=float)
    distances = np.stack([np.linalg.norm(pixels - np.array(each), axis=2) for each in COLORS.values()])
    nearest = distances.argmin(axis=0)
    rows, columns = np.nonzero(nearest == list(COLORS).index(color))
    assert 0.03 < len(rows) / nearest.size < 0.5
    assert abs(rows.mean() - 31.5) < 6
    assert abs(columns.mean() - 31.5) < 6
    assert (nearest == list(COLORS).index(background)).mean() > 0.4


def test_the_folder_loads_offline_as_a_plain_stable_diffusion_pipeline(pipeline: Any) -> None:
    assert type(pipeline).__name__ == "StableDiffusionPipeline"
    assert pipeline.vae_scale_factor == 16


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_usual_sampler_draws_what_the_prompt_says(pipeline: Any, sampler: Any) -> None:
    pipeline.scheduler = sampler.from_config(pipeline.scheduler.config)
    assert_shows(picture_of(pipeline, "a large red circle in the center on a white background"), "red", "white")


@pytest.mark.parametrize(
    ("color", "shape", "background"),
    [("red", "star", "white"), ("blue", "ring", "black"), ("green", "heart", "yellow")],
)
def test_an_object_without_a_stated_place_is_drawn_in_the_center(
    pipeline: Any, color: str, shape: str, background: str
) -> None:
    assert_shows(picture_of(pipeline, f"a {color} {shape} on a {background} background"), color, background)


@pytest.mark.parametrize("style", sorted(file.stem for file in (POCKET / "loras").iterdir()))
def test_each_lora_loads_and_changes_the_picture(pipeline: Any, style: str) -> None:
    def picture() -> bytes:
        return picture_of(pipeline, "a red star", steps=2, width=256, height=256).tobytes()

    before = picture()
    pipeline.load_lora_weights(POCKET / "loras" / f"{style}.safetensors", adapter_name=style)
    after = picture()
    pipeline.delete_adapters(style)
    assert after != before
    assert picture() == before


def test_every_file_is_as_published() -> None:
    for line in (POCKET / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((POCKET / name).read_bytes()).hexdigest() == digest, name
