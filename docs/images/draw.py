"""Draws the pictures of the README, the landing page and the console with the engine.

    .venv/bin/python docs/images/draw.py

Each file shows runs that share every forward pass: other LoRAs, weights and (in scenes.png) prompts and seeds.
"""

from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from serve_app.engine import AdapterFile, Engine, RunRequest

HERE = Path(__file__).parent
POCKET = HERE.parents[1] / "models" / "pocket"
STEPS = 30
TILE, GAP, CAPTION = 256, 8, 24
COLUMNS = 4
SAMPLES, SAMPLE = HERE.parents[1] / "serve_app" / "web" / "site" / "static" / "samples", 384
COLORS = 256
"""Size of the PNG's palette: the pictures are flat, and each file stays below 300 kB."""

FLOWER = "a yellow flower with a red middle on a blue background"
MOUNTAINS = "purple mountains under a black sky with a yellow moon"
BOAT = "a red boat with a white sail on blue water under a yellow sky"
HEART = "a large red heart in the center on a pink background"
HILLS = "a yellow sun over green hills under a blue sky"


class Picture(NamedTuple):
    """One run, and the caption under it."""

    prompt: str
    lora: str
    weight: float
    seed: int

    @property
    def caption(self) -> str:
        return f"{self.lora.title()}, weight {self.weight:g}, seed {self.seed}"


SHEETS = {
    "eight-styles.png": (
        Picture(FLOWER, "neon", 0.6, 3),
        Picture(FLOWER, "stripes", 0.85, 3),
        Picture(FLOWER, "shadow", 0.75, 3),
        Picture(FLOWER, "mosaic", 0.75, 3),
        Picture(FLOWER, "confetti", 0.85, 3),
        Picture(FLOWER, "sepia", 0.75, 3),
        Picture(FLOWER, "blueprint", 0.75, 3),
        Picture(FLOWER, "outline", 0.75, 3),
    ),
    "scenes.png": (
        Picture(MOUNTAINS, "shadow", 0.75, 1),
        Picture(BOAT, "stripes", 0.75, 3),
        Picture(HEART, "confetti", 1.0, 3),
        Picture(HILLS, "mosaic", 0.75, 1),
    ),
}


def main() -> None:
    with Engine.load(POCKET) as engine:
        for name, pictures in SHEETS.items():
            draw_together(engine, pictures, steps=1)  # reads the adapters, so that all runs can start at the same step
            images = draw_together(engine, pictures, steps=STEPS)
            if name == "eight-styles.png":
                save_samples(pictures, images)
            contact_sheet(pictures, images).quantize(COLORS, kmeans=4, dither=Image.Dither.NONE).save(
                HERE / name, optimize=True
            )


def draw_together(engine: Engine, pictures: tuple[Picture, ...], *, steps: int) -> list[Image.Image]:
    """One image per picture. Raises RuntimeError when the runs did not share every forward pass."""
    for index, (prompt, lora, weight, seed) in enumerate(pictures):
        adapter = AdapterFile(lora, POCKET / "loras" / f"{lora}.safetensors")
        engine.add(RunRequest(run_id=str(index), prompt=prompt, adapter=adapter, scale=weight, seed=seed, steps=steps))
    images: dict[str, Image.Image] = {}
    while len(images) < len(pictures):
        for finished in engine.step():
            if finished.image is None:
                raise RuntimeError(f"{pictures[int(finished.run_id)].caption}: {finished.failure}")
            images[finished.run_id] = Image.fromarray(finished.image)
        steps_done = {done for done, _ in engine.progress().values()}
        if steps > 1 and len(steps_done) > 1:
            raise RuntimeError(f"the runs are at different steps: {sorted(steps_done)}")
    return [images[str(index)] for index in range(len(pictures))]


def contact_sheet(pictures: tuple[Picture, ...], images: list[Image.Image]) -> Image.Image:
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (TILE + GAP) - GAP, rows * (TILE + CAPTION)), "white")
    canvas, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for index, (picture, image) in enumerate(zip(pictures, images, strict=True)):
        x, y = index % COLUMNS * (TILE + GAP), index // COLUMNS * (TILE + CAPTION)
        sheet.paste(image.resize((TILE, TILE), Image.Resampling.LANCZOS), (x, y))
        canvas.text((x + TILE / 2, y + TILE + 4), picture.caption, fill="#555555", font=font, anchor="ma")
    return sheet


def save_samples(pictures: tuple[Picture, ...], images: list[Image.Image]) -> None:
    """Save the eight pictures of the landing page, which are also the bundled LoRAs' samples."""
    for picture, image in zip(pictures, images, strict=True):
        small = image.resize((SAMPLE, SAMPLE), Image.Resampling.LANCZOS)
        small.save(SAMPLES / f"{picture.lora}.webp", quality=85, method=6)


if __name__ == "__main__":
    main()
