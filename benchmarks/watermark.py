"""Measures the watermark: what of it survives, who is accused wrongly, what it does to a picture, and its time.

`python -m benchmarks.watermark [PHOTOGRAPH ...]` draws pictures with the bundled model and its LoRAs, cuts others from
photographs, matplotlib's among them, marks each, and looks for the mark after JPEG, after a change of size, after both.
"""

import argparse
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

from serve_app.marking.watermark import THRESHOLD, Pixels, Watermark, luminance_of
from serve_app.settings import ROOT

SIDE, STEPS = 512, 12
FROM_EACH = 6
"""How many squares are cut from a photograph."""
PROMPTS = (
    "a red circle on a blue background", "a yellow flower with a red middle on a blue background",
    "purple mountains under a black sky with a yellow moon", "a green star on a white background",
    "a large red heart in the center on a pink background", "two blue houses under a yellow sun",
)  # fmt: skip
HOPPER = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"


def drawn(wanted: int) -> Iterator[Pixels]:
    """Draw pictures with the pocket model, with each of its LoRAs and without."""
    from serve_app import engine  # here: tests take the rest of this file

    folder = ROOT / "models" / "pocket"
    found = sorted((folder / "loras").glob("*.safetensors"))
    files = [None, *(engine.AdapterFile(id=file.stem, path=file) for file in found)]
    with engine.Engine.load({"pocket": folder}, engine.EngineOptions(exact=False)) as drawing:
        for index in range(wanted):
            adapter, prompt = files[index % len(files)], PROMPTS[index % len(PROMPTS)]
            asked = engine.RunRequest(run_id=str(index), prompt=prompt, seed=index, adapter=adapter, steps=STEPS)
            drawing.add(asked)
        while drawing.has_work:
            for run in drawing.step():
                assert run.image is not None, run.failure
                yield run.image


def cut(photographs: list[Path]) -> Iterator[Pixels]:
    """Cut squares from photographs, from corner to corner."""
    for file in photographs:
        photo = np.asarray(Image.open(file).convert("RGB"))
        room = [side - min(SIDE, side) for side in photo.shape[:2]]
        for place in range(FROM_EACH):
            top, left = (each * place // max(1, FROM_EACH - 1) for each in room)
            yield photo[top : top + SIDE, left : left + SIDE]


def jpeg(pixels: Pixels, quality: int = 80) -> Pixels:
    out = BytesIO()
    Image.fromarray(pixels).save(out, "jpeg", quality=quality)
    return np.asarray(Image.open(out))


def half(pixels: Pixels) -> Pixels:
    picture = Image.fromarray(pixels)
    return np.asarray(picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS))


CHANGES: Mapping[str, Callable[[Pixels], Pixels]] = {
    "unchanged": lambda pixels: pixels,
    "JPEG 80": jpeg,
    "half the size": half,
    "half the size, JPEG 80": lambda pixels: jpeg(half(pixels)),
    "a quarter of the size, JPEG 80": lambda pixels: jpeg(half(half(pixels))),
    "JPEG 50": lambda pixels: jpeg(pixels, 50),
    "a tenth cut off": lambda pixels: pixels[SIDE // 20 :, SIDE // 20 :],
}


def score(mark: Watermark, pixels: Pixels) -> float:
    return mark.score(luminance_of(Image.fromarray(pixels)))


def psnr(before: Pixels, after: Pixels) -> float:
    return float(10 * np.log10(255**2 / np.mean((before.astype(float) - after) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photographs", nargs="*", type=Path)
    parser.add_argument("--pictures", type=int, default=100)
    options = parser.parse_args()
    photographs = list(cut([HOPPER, *options.photographs]))
    pictures = [*photographs, *drawn(options.pictures - len(photographs))]
    print(f"{len(pictures)} pictures of {SIDE}², {len(photographs)} of them cut from photographs")
    mark = Watermark(b"the operator's")
    marked = [mark.added_to(pixels) for pixels in pictures]
    quality = [psnr(*pair) for pair in zip(pictures, marked, strict=True)]
    print(f"PSNR {statistics.median(quality):.1f} dB ({min(quality):.1f} to {max(quality):.1f})")
    for name, change in CHANGES.items():
        scores = sorted(score(mark, change(pixels)) for pixels in marked)
        found = sum(each >= THRESHOLD for each in scores)
        print(f"{name}: {found} found; score {statistics.median(scores):.1f}, the lowest {scores[0]:.1f}")
    others = [Watermark(b"%d" % index) for index in range(10)]
    for name, group in (("not marked", pictures), ("marked by another", marked)):
        scores = [score(other, pixels) for pixels in group for other in others]
        wrong = sum(each >= THRESHOLD for each in scores)
        print(
            f"{name}: {wrong} of {len(scores)} found; score {statistics.pstdev(scores):.2f} σ, the highest {max(scores):.2f}"
        )
    large = np.asarray(Image.fromarray(pictures[0]).resize((1024, 1024)))
    times = [1000 * each for each in timeit.repeat(lambda: mark.added_to(large), number=1, repeat=20)]
    print(f"1024²: {statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
