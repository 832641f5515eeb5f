"""PNG encoding, with the generator's name in the file."""

from functools import cache
from importlib.metadata import version
from io import BytesIO

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from serve_app.service.executor import Pixels


def encode_png(pixels: Pixels, *, job_id: str | None = None) -> bytes:
    """Encode pixels; the same pixels give the same bytes.

    A `job_id` is written into a text chunk beside the generator's name; then no two jobs give the same file.
    """
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
