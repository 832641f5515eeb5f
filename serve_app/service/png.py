"""A finished image as PNG bytes that say what made them."""

from functools import cache
from importlib.metadata import version
from io import BytesIO

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from serve_app.service.bench import Pixels


def encode_png(pixels: Pixels, *, job_id: str | None = None) -> bytes:
    """The same pixels give the same bytes. A `job_id` is written into the text chunk beside the generator's name, and
    with it two jobs never give the same file: the caller decides which of the two is wanted."""
    text = PngInfo()
    if job_id is not None:
        text.add_text("Job", job_id)
    text.add_text("Software", generator_name())
    out = BytesIO()
    Image.fromarray(pixels).save(out, "png", pnginfo=text, compress_level=4)
    return out.getvalue()


@cache
def generator_name() -> str:
    return f"Atelier {version('atelier')}"
