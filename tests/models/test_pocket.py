"""The bundled model loads offline, draws what the prompt says, and has the published files."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from PIL import Image

from models.pocket.recipe.captions import plain_caption
from models.pocket.recipe.checker import check
from models.pocket.recipe.drawing import draw_scene
from models.pocket.recipe.scenes import Scene, Thing, held_out_scene
from models.pocket.recipe.styles import STYLES

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket"
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


def picture_of(pipeline: Any, prompt: str, *, steps: int = 20, width: int = 512, height: int = 512) -> Image.Image:
    generator = torch.Generator().manual_seed(1)
    result = pipeline(prompt, generator=generator, num_inference_steps=steps, width=width, height=height)
    return result.images[0]


def test_the_folder_loads_offline_as_a_plain_stable_diffusion_pipeline(pipeline: Any) -> None:
    assert type(pipeline).__name__ == "StableDiffusionPipeline"
    assert pipeline.vae_scale_factor == 16


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_usual_sampler_draws_what_the_prompt_says(pipeline: Any, sampler: Any) -> None:
    scene = Scene("white", (Thing("circle", "red", "large", 0.5, 0.5, 0.25, "center"),))
    pipeline.scheduler = sampler.from_config(pipeline.scheduler.config)
    assert check(picture_of(pipeline, plain_caption(scene)), scene).accepted


@pytest.mark.parametrize(
    ("color", "shape", "background"),
    [("red", "star", "white"), ("blue", "ring", "black"), ("green", "heart", "yellow")],
)
def test_an_object_without_a_stated_place_is_drawn_in_the_center(
    pipeline: Any, color: str, shape: str, background: str
) -> None:
    scene = Scene(background, (Thing(shape, color, "medium", 0.5, 0.5, 0.18, "center"),))
    assert check(picture_of(pipeline, f"a {color} {shape} on a {background} background"), scene).accepted


@pytest.mark.parametrize("style", sorted(STYLES))
def test_each_lora_loads_and_changes_the_picture(pipeline: Any, style: str) -> None:
    def picture() -> bytes:
        return picture_of(pipeline, "a red star", steps=2, width=256, height=256).tobytes()

    before = picture()
    pipeline.load_lora_weights(POCKET / "loras" / f"{style}.safetensors", adapter_name=style)
    after = picture()
    pipeline.delete_adapters(style)
    assert after != before
    assert picture() == before


def test_the_checker_accepts_drawn_scenes_and_refuses_other_prompts() -> None:
    rng = random.Random(3)
    for i in range(12):
        scene, other = held_out_scene(rng, 1 + i % 2), held_out_scene(rng, 1 + i % 2)
        drawn = draw_scene(scene, 512, 512)
        assert check(drawn, scene).accepted
        assert not check(drawn, other).accepted


def test_every_file_is_as_published() -> None:
    for line in (POCKET / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((POCKET / name).read_bytes()).hexdigest() == digest, name
