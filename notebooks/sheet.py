"""Pictures side by side over their captions, small enough to stay in a notebook."""

from PIL import Image, ImageDraw

SIDE, GAP, CAPTION = 256, 8, 24
COLORS = 256
"""A palette of this size makes a file a third as large, and the bundled model's flat pictures hardly differ."""


def sheet(pictures, captions, columns=4):
    rows = -(-len(pictures) // columns)
    page = Image.new("RGB", (columns * (SIDE + GAP) - GAP, rows * (SIDE + CAPTION)), "white")
    pen = ImageDraw.Draw(page)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = place % columns * (SIDE + GAP), place // columns * (SIDE + CAPTION)
        page.paste(picture.resize((SIDE, SIDE)), (x, y))
        pen.text((x + SIDE / 2, y + SIDE + 4), caption, fill="#555555", font_size=13, anchor="ma")
    return page.quantize(COLORS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)  # keeps rare colors
