"""Measures the published folder and writes `report.json`: `python -m models.pocket.recipe.report`."""

import argparse
import json
import random
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from .captions import plain_caption
from .checker import Verdict, check, colour_share, palette_distance
from .drawing import draw_scene, pixels
from .plan import ROOT
from .sampling import generate, load_pipeline
from .scenes import COLOURS, Scene, held_out_scene, random_landscape
from .style_statistics import fit_discriminant
from .styles import STYLES
from .upscaler import SCALES, load_upscaler, shrunk

REPORT = ROOT / "report.json"
BURNT = 14.0
"""Mean Lab distance to the world's colours above which a picture counts as burnt out (drawn pictures: below 3)."""
WEIGHTS = (0.1, 0.5, 1.0)

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """How much to measure. The full report is `Sample()`; `scaled` makes a quick one."""

    prompts: int = 200
    style_prompts: int = 20
    negative_prompts: int = 24
    guidance_prompts: int = 40
    upscaled: int = 40
    timed: int = 3
    compiled: bool = False
    """Prompts are drawn by a compiled UNet: sooner, after minutes of compiling, and the same but for rounding."""

    def scaled(self, share: float) -> "Sample":
        counts = {name: count for name, count in vars(self).items() if name != "compiled"}
        return replace(self, **{name: max(2, round(count * share)) for name, count in counts.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the full samples; 0.2 takes minutes")
    parser.add_argument("--only", nargs="*", choices=sorted(SECTIONS), help="measure these sections, keep the others")
    parser.add_argument(
        "--compile", action="store_true", help="draw the prompts sooner, by torch.compile; needs a C++ compiler"
    )
    options = parser.parse_args()
    sample = Sample(compiled=options.compile)
    sample = sample if options.share == 1.0 else sample.scaled(options.share)
    report: Figures = json.loads(REPORT.read_text()) if options.only and REPORT.exists() else {}
    for name in options.only or SECTIONS:
        began = time.monotonic()
        report[name] = SECTIONS[name](sample)
        print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(report[name])}", flush=True)
        REPORT.write_text(json.dumps(report, indent=2) + "\n")


def measure_speed(sample: Sample) -> Figures:
    """Seconds per picture at 512², 30 steps, guidance 7.5, alone on 2 threads; memory above torch's own."""
    torch.set_num_threads(2)
    before = _resident_mb()
    pipeline = load_pipeline()
    generate(pipeline, ["a red star"], steps=2)
    times: list[float] = []
    for i in range(sample.timed):
        began = time.perf_counter()
        generate(pipeline, ["a large red star on a white background"], seed=i)
        times.append(time.perf_counter() - began)
    return {
        "seconds_per_image_512_30_steps": round(min(times), 2),
        "seconds_median": round(float(np.median(times)), 2),
        "peak_memory_above_torch_mb": round(_peak_mb() - before),
    }


def measure_following(sample: Sample) -> Figures:
    """Held-out prompts, judged by the checker: shares that are right, at each size and guidance."""
    pipeline = load_pipeline()
    if sample.compiled:
        pipeline.unet.compile(dynamic=False)
    scenes = held_out_scenes(sample.prompts)
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
        "colour": _share(singles, "colour"),
        "position": _share(singles, "position"),
        "shape": _share(singles, "shape"),
        "both objects": round(float(np.mean([all(v.objects) for v in pairs])), 3),
        "two objects: colours": _share(pairs, "colour"),
        "two objects: relation": _share(pairs, "position"),
    }


def _share(verdicts: list[Verdict], what: str) -> float:
    return round(float(np.mean([getattr(verdict, what) for verdict in verdicts])), 3)


def measure_loras(sample: Sample) -> Figures:
    """Measure each LoRA.

    At weight 1.0 the discriminant names it; and each weight moves the picture from the base's by so much.
    """
    pipeline, discriminant = load_pipeline(), fit_discriminant()
    rng = random.Random(77)
    scenes = [
        random_landscape(rng) if i % 5 == 4 else held_out_scene(rng, 1 + i % 2) for i in range(sample.style_prompts)
    ]
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
            "recognised": _named(discriminant.classify, styled, style),
            "change by weight": moved,
            "grows": round(float(growing.mean()), 3),
        }
        pipeline.delete_adapters(style)
    return figures


def _named(classify: Any, pictures: list[Image.Image], name: str) -> float:
    return round(float(np.mean([classify(picture) == name for picture in pictures])), 3)


def _difference(one: Image.Image, other: Image.Image) -> float:
    """Mean absolute difference of two pictures, 0..255."""
    return float(np.abs(np.asarray(one, dtype=np.float32) - np.asarray(other, dtype=np.float32)).mean())


def measure_guidance(sample: Sample) -> Figures:
    """Measure guidance: negative prompts, and pictures at guidance 1, 7.5 and 20.

    The colour that covers most of a picture, named in the negative prompt, loses its share.
    """
    pipeline = load_pipeline()
    plain: list[float] = []
    against: list[float] = []
    for seed in range(900, 900 + sample.negative_prompts):
        (picture,) = generate(pipeline, ["a large circle in the center"], seed=seed)
        share, colour = max((colour_share(picture, colour), colour) for colour in COLOURS)
        (without,) = generate(pipeline, ["a large circle in the center"], seed=seed, negative=colour)
        plain.append(share)
        against.append(colour_share(without, colour))
    scenes = held_out_scenes(sample.guidance_prompts)
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


def measure_upscalers(sample: Sample) -> Figures:
    """PSNR on held-out drawn scenes against Lanczos, from the same small picture."""
    rng = random.Random(31)
    scenes = [held_out_scene(rng, 1 + i % 2) if i % 3 else random_landscape(rng) for i in range(sample.upscaled)]
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
