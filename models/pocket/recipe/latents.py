"""Pictures encoded once and kept on disk, so that the UNet's training never draws or encodes."""

import random
import zlib
from collections.abc import Iterator

import torch
from diffusers import AutoencoderTiny
from PIL import Image
from torch import Tensor

from .drawing import draw_scene, pixels
from .plan import WORK, Phase, Plan
from .scenes import Scene, training_scene
from .styles import styled_scene
from .training import Progress, half_precision

ENCODE_BATCH = 16


def scene_number(i: int, phase: str, seed: int) -> Scene:
    """Return the i-th training scene of a phase: drawn again from its number wherever it is needed."""
    return training_scene(random.Random(f"{seed} {phase} {i}"))


def cached_latents(
    autoencoder: AutoencoderTiny, plan: Plan, phase: Phase, size: tuple[int, int], style: str | None = None
) -> Tensor:
    """Return latents of the phase's scenes at size (width, height), in order.

    They are (pictures, 8, height/16, width/16) in half precision. The file's name identifies scenes and drawing, so
    that what was cached before the world changed is never taken for its scenes'.
    """
    width, height = size
    scenes = [scene_number(i, phase.name, plan.seed) for i in range(phase.pictures)]
    drawn = zlib.crc32(_picture(plan, scenes[0], 0, size, style).tobytes(), zlib.crc32(repr(scenes).encode()))
    name = f"latents {phase.name} {style or 'plain'} {width}x{height} {phase.pictures} {drawn:08x}".replace(" ", "-")
    path = WORK / f"{name}.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    device = next(autoencoder.parameters()).device
    progress = Progress(f"{style or phase.name} {width}x{height}", phase.pictures // ENCODE_BATCH, every=100)
    latents: list[Tensor] = []
    for step, pictures in enumerate(_pictures(plan, scenes, size, style)):
        with torch.no_grad(), half_precision(device):
            latents.append(autoencoder.encode(pictures.to(device)).latents.to("cpu", torch.float16))
        progress.report(step, 0.0)
    whole = torch.cat(latents)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole, path)
    return whole


def _pictures(plan: Plan, scenes: list[Scene], size: tuple[int, int], style: str | None) -> Iterator[Tensor]:
    for first in range(0, len(scenes), ENCODE_BATCH):
        batch = [
            torch.from_numpy(pixels(_picture(plan, scene, i, size, style)))
            for i, scene in enumerate(scenes[first : first + ENCODE_BATCH], first)
        ]
        yield torch.stack(batch).contiguous(memory_format=torch.channels_last)


def _picture(plan: Plan, scene: Scene, i: int, size: tuple[int, int], style: str | None) -> Image.Image:
    if style is None:
        return draw_scene(scene, *size)
    return styled_scene(scene, style, *size, random.Random(f"{plan.seed} {style} {i}"))
