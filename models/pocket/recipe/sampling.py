"""Pictures from the published folder through plain diffusers, several prompts at a time."""

import time
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from PIL import Image

from .plan import ROOT

STEPS, GUIDANCE = 30, 7.5


def load_pipeline(folder: Path = ROOT) -> StableDiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    assert isinstance(pipeline, StableDiffusionPipeline)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet.to(memory_format=torch.channels_last)
    pipeline.vae.to(memory_format=torch.channels_last)
    return pipeline


def generate(
    pipeline: StableDiffusionPipeline,
    prompts: list[str],
    *,
    seed: int = 0,
    size: tuple[int, int] = (512, 512),
    guidance: float = GUIDANCE,
    negative: str | None = None,
    steps: int = STEPS,
    batch: int = 4,
    label: str = "",
) -> list[Image.Image]:
    """Generate one picture for each prompt; the i-th starts from seed + i, whatever the batch.

    A label asks for progress lines.
    """
    pictures: list[Image.Image] = []
    began = time.monotonic()
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(some))]
        negatives = [negative] * len(some) if negative is not None else None
        pictures += pipeline(
            some,
            negative_prompt=negatives,
            generator=generators,
            width=size[0],
            height=size[1],
            guidance_scale=guidance,
            num_inference_steps=steps,
        ).images
        if label and len(pictures) % 20 < len(some):
            seconds = (time.monotonic() - began) / len(pictures)
            print(f"{label:<24} {len(pictures):>4}/{len(prompts)}  {seconds:.2f} s/picture", flush=True)
    return pictures
