"""The recipe runs by its command in a copy of the published folder, is killed and started again."""

import asyncio
import shutil
import sys
from asyncio.subprocess import Process
from pathlib import Path

import pytest
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from safetensors.torch import load_file

from tests.support import POCKET, wait_until

STAGES = ("text", "unet", "agreement", "loras", "upscalers", "publish")


async def started(folder: Path, *stages: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "models.pocket.recipe", "--share", "0.002", *stages, cwd=folder
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_the_recipe_goes_on_from_the_published_folder_and_from_where_it_was_killed(tmp_path: Path) -> None:
    copy = tmp_path / "models" / "pocket"
    shutil.copytree(POCKET, copy, ignore=shutil.ignore_patterns(".work", "__pycache__"))
    killed = await started(tmp_path, "adopt", *STAGES)
    try:
        checkpoint = copy / "recipe" / ".work" / "unet.pt"
        await wait_until(lambda: checkpoint.exists() or killed.returncode is not None, 900)
        assert killed.returncode is None, "it ended before its UNet had a checkpoint"
    finally:
        if killed.returncode is None:
            killed.kill()
        await killed.wait()
    again = await started(tmp_path, *STAGES)
    assert await again.wait() == 0
    check = await asyncio.create_subprocess_exec("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=copy)
    assert await check.wait() == 0
    for weights in ("unet/diffusion_pytorch_model.safetensors", "loras/outline.safetensors"):
        before, after = load_file(POCKET / weights), load_file(copy / weights)
        assert before.keys() == after.keys()
        assert any(not value.equal(after[name]) for name, value in before.items()), f"{weights} did not learn"
    pipeline = DiffusionPipeline.from_pretrained(copy, local_files_only=True)
    assert isinstance(pipeline, StableDiffusionPipeline)
