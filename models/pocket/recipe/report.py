"""Measures the published folder and writes `report.json`: `python -m models.pocket.recipe.report`."""

import argparse
import json
import random
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from PIL import Image

from .captions import plain_caption
from .checker import Verdict, check, color_share, palette_distance
from .drawing import draw_scene, pixels
from .plan import ROOT
from .scenes import COLORS, Scene, held_out_scene, random_landscape
from .style_statistics import fit_discriminant
from .styles import STYLES
from .upscaler import SCALES, load_upscaler, shrunk

REPORT = ROOT / "report.json"
BURNT = 14.0
"""Mean Lab distance to the world's colors above which a picture counts as burnt out (drawn pictures: below 3)."""
WEIGHTS = (0.1, 0.5, 1.0)
PROMPTS, STYLE_PROMPTS, NEGATIVE_PROMPTS, GUIDANCE_PROMPTS, UPSCALED, TIMED = 200, 20, 24, 40, 40, 3
"""How many pictures each section measures."""
BATCH = 4
"""Pictures that are drawn together."""

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(SECTIONS), help="measure these sections, keep the others")
    parser.add_argument(
        "--compile", action="store_true", help="draw the prompts sooner, by torch.compile; needs a C++ compiler"
    )
    options = parser.parse_args()
    sections = SECTIONS | {"following": partial(measure_following, compiles=options.compile)}
    report: Figures = json.loads(REPORT.read_text()) if options.only and REPORT.exists() else {}
    for name in options.only or SECTIONS:
        began = time.monotonic()
        report[name] = sections[name]()
        print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(report[name])}", flush=True)
        REPORT.write_text(json.dumps(report, indent=2) + "\n")


def measure_speed() -> Figures:
    """Measure seconds per picture at 512², 30 steps, guidance 7.5, alone on 2 threads; memory above torch's own."""
    torch.set_num_threads(2)
    before = _resident_mb()
    pipeline = load_pipeline()
    generate(pipeline, ["a red star"], steps=2)
    times: list[float] = []
    for i in range(TIMED):
        began = time.perf_counter()
        generate(pipeline, ["a large red star on a white background"], seed=i)
        times.append(time.perf_counter() - began)
    return {
        "seconds_per_image_512_30_steps": round(min(times), 2),
        "seconds_median": round(float(np.median(times)), 2),
        "peak_memory_above_torch_mb": round(_peak_mb() - before),
    }


def measure_following(*, compiles: bool = False) -> Figures:
    """Held-out prompts, judged by the checker: shares that are right, at each size and guidance."""
    pipeline = load_pipeline()
    if compiles:
        pipeline.unet.compile(dynamic=False)
    scenes = held_out_scenes(PROMPTS)
    cases = {
        "512 guidance 7.5": (512, 7.5),
        "512 guidance 4": (512, 4.0),
        "768 guidance 7.5": (768, 7.5),
        "768 guidance 4": (768, 4.0),
    }
    return {name: _following(pipeline, scenes, side, guidance, name) for name, (side, guidance) in cases.items()}


def held_out_scenes(count: int) -> list[Scene]:
    """Return held-out scenes: half of one object with a position, half of two objects.

    Each has a combination that training never showed.
    """
    rng = random.Random(2024)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = held_out_scene(rng, 1 + len(scenes) % 2)
        if scene.relation or scene.things[0].position:
            scenes.append(scene)
    return scenes


def _following(
    pipeline: StableDiffusionPipeline, scenes: list[Scene], side: int, guidance: float, label: str
) -> Figures:
    prompts = [plain_caption(scene) for scene in scenes]
    pictures = generate(pipeline, prompts, size=(side, side), guidance=guidance, seed=100, label=label)
    verdicts = [check(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    singles = [v for v in verdicts if len(v.objects) == 1]
    pairs = [v for v in verdicts if len(v.objects) == 2]
    return {
        "prompts": len(scenes),
        "background": _share(verdicts, "background"),
        "color": _share(singles, "color"),
        "position": _share(singles, "position"),
        "shape": _share(singles, "shape"),
        "both objects": round(float(np.mean([all(v.objects) for v in pairs])), 3),
        "two objects: colors": _share(pairs, "color"),
        "two objects: relation": _share(pairs, "position"),
    }


def _share(verdicts: list[Verdict], what: str) -> float:
    return round(float(np.mean([getattr(verdict, what) for verdict in verdicts])), 3)


def measure_loras() -> Figures:
    """Measure each LoRA.

    At weight 1.0 the discriminant names it; and each weight moves the picture from the base's by so much.
    """
    pipeline, discriminant = load_pipeline(), fit_discriminant()
    rng = random.Random(77)
    scenes = [random_landscape(rng) if i % 5 == 4 else held_out_scene(rng, 1 + i % 2) for i in range(STYLE_PROMPTS)]
    prompts = [plain_caption(scene) for scene in scenes]
    base = generate(pipeline, prompts, seed=500)
    figures: Figures = {"prompts": len(prompts), "base": _named(discriminant.classify, base, "base")}
    for style in STYLES:
        pipeline.load_lora_weights(ROOT / "loras" / f"{style}.safetensors", adapter_name=style)
        moved: dict[str, float] = {}
        growing = np.full(len(prompts), True)
        last = np.zeros(len(prompts))
        for weight in WEIGHTS:
            pipeline.set_adapters([style], [weight])
            styled = generate(pipeline, prompts, seed=500, label=f"{style} {weight}")
            change = np.array([_difference(a, b) for a, b in zip(base, styled, strict=True)])
            moved[str(weight)] = round(float(change.mean()), 2)
            growing &= change > last
            last = change
        figures[style] = {
            "recognized": _named(discriminant.classify, styled, style),
            "change by weight": moved,
            "grows": round(float(growing.mean()), 3),
        }
        pipeline.delete_adapters(style)
    return figures


def _named(classify: Any, pictures: list[Image.Image], name: str) -> float:
    return round(float(np.mean([classify(picture) == name for picture in pictures])), 3)


def _difference(one: Image.Image, other: Image.Image) -> float:
    """Return mean absolute difference of two pictures, 0..255."""
    return float(np.abs(np.asarray(one, dtype=np.float32) - np.asarray(other, dtype=np.float32)).mean())


def measure_guidance() -> Figures:
    """Measure guidance: negative prompts, and pictures at guidance 1, 7.5 and 20.

    The color that covers most of a picture, named in the negative prompt, loses its share.
    """
    pipeline = load_pipeline()
    plain: list[float] = []
    against: list[float] = []
    for seed in range(900, 900 + NEGATIVE_PROMPTS):
        (picture,) = generate(pipeline, ["a large circle in the center"], seed=seed)
        share, color = max((color_share(picture, color), color) for color in COLORS)
        (without,) = generate(pipeline, ["a large circle in the center"], seed=seed, negative=color)
        plain.append(share)
        against.append(color_share(without, color))
    scenes = held_out_scenes(GUIDANCE_PROMPTS)
    texts = [plain_caption(scene) for scene in scenes]
    figures: Figures = {
        "negative": {
            "share without": round(float(np.mean(plain)), 4),
            "share with": round(float(np.mean(against)), 4),
            "lower": round(float(np.mean([b < a for a, b in zip(plain, against, strict=True)])), 3),
        }
    }
    for guidance in (1.0, 7.5, 20.0):
        pictures = generate(pipeline, texts, guidance=guidance, seed=100, label=f"guidance {guidance:g}")
        accepted = [check(picture, scene).accepted for picture, scene in zip(pictures, scenes, strict=True)]
        figures[f"guidance {guidance:g}"] = {
            "accepted": round(float(np.mean(accepted)), 3),
            "not burnt out": round(float(np.mean([palette_distance(p) < BURNT for p in pictures])), 3),
        }
    return figures


def measure_upscalers() -> Figures:
    """PSNR on held-out drawn scenes against Lanczos, from the same small picture."""
    rng = random.Random(31)
    scenes = [held_out_scene(rng, 1 + i % 2) if i % 3 else random_landscape(rng) for i in range(UPSCALED)]
    figures: Figures = {}
    for scale in SCALES:
        model = load_upscaler(scale)
        gains: list[tuple[float, float]] = []
        for scene in scenes:
            large = draw_scene(scene, 512, 512)
            small = shrunk(large, scale)
            with torch.no_grad():
                enlarged = model((torch.from_numpy(pixels(small))[None] + 1) / 2)[0].clamp(0, 1)
            picture = Image.fromarray((enlarged.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
            gains.append((_psnr(picture, large), _psnr(small.resize(large.size, Image.Resampling.LANCZOS), large)))
        ours, lanczos = np.mean(gains, axis=0)
        figures[f"x{scale}"] = {
            "psnr": round(float(ours), 2), "lanczos": round(float(lanczos), 2), "gain": round(float(ours - lanczos), 2),
        }  # fmt: skip
    return figures


def _psnr(picture: Image.Image, truth: Image.Image) -> float:
    error = np.square(np.asarray(picture, dtype=np.float64) - np.asarray(truth, dtype=np.float64)).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def load_pipeline() -> StableDiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(ROOT, local_files_only=True)
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
    guidance: float = 7.5,
    negative: str | None = None,
    steps: int = 30,
    label: str = "",
) -> list[Image.Image]:
    """Generate one picture for each prompt; the i-th starts from seed + i, whatever the batch.

    A label asks for progress lines.
    """
    pictures: list[Image.Image] = []
    began = time.monotonic()
    for first in range(0, len(prompts), BATCH):
        some = prompts[first : first + BATCH]
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


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


SECTIONS = {
    "speed": measure_speed,
    "following": measure_following,
    "loras": measure_loras,
    "guidance": measure_guidance,
    "upscalers": measure_upscalers,
}


if __name__ == "__main__":
    main()
