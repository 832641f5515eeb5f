"""The contact sheet: one row per prompt, one column for the base and for each style."""

from pathlib import Path

from diffusers import StableDiffusionPipeline
from PIL import Image, ImageDraw

from .plan import ROOT
from .sampling import generate
from .styles import STYLES

PROMPTS = (
    "a large red star on the left of a small blue ring on a white background",
    "a yellow sun over green hills under a blue sky",
    "a white house with a red roof on a green field under a blue sky",
    "a red boat with a white sail on blue water under a pink sky",
    "a large orange heart in the center on a purple background",
)
SEED = 4
TILE = 176
MARGIN, TITLE = 4, 18
PALETTE = 200
"""Colours of the file: flat pictures need no more, and it stays below 1 MB."""
PATH = ROOT / "contact_sheet.png"


def write_contact_sheet(pipeline: StableDiffusionPipeline, path: Path = PATH) -> Path:
    columns = {"base": generate(pipeline, list(PROMPTS), seed=SEED)}
    for style in STYLES:
        pipeline.load_lora_weights(ROOT / "loras" / f"{style}.safetensors", adapter_name=style)
        pipeline.set_adapters([style], [1.0])
        columns[style] = generate(pipeline, list(PROMPTS), seed=SEED)
        pipeline.delete_adapters(style)
    sheet = Image.new("RGB", (len(columns) * (TILE + MARGIN) + MARGIN, len(PROMPTS) * (TILE + MARGIN) + TITLE), "white")
    canvas = ImageDraw.Draw(sheet)
    for column, (name, pictures) in enumerate(columns.items()):
        x = MARGIN + column * (TILE + MARGIN)
        canvas.text((x, 3), name, fill="black")
        for row, picture in enumerate(pictures):
            sheet.paste(picture.resize((TILE, TILE), Image.Resampling.LANCZOS), (x, TITLE + row * (TILE + MARGIN)))
    sheet.quantize(PALETTE, dither=Image.Dither.NONE).save(path, optimize=True)
    return path
