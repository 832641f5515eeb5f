"""Reads a customer's picture in a process of limited memory and time, and writes it anew as a PNG without metadata.

`python -m serve_app.jobs.picture_file SOURCE TARGET [mask]` prints one line of JSON: {"width": …, "height": …} or
{"refused": reason}.
"""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from serve_app.domain.errors import UnsupportedMediaType
from serve_app.safetensors_file import limit_memory
from serve_app.store.limited_process import read_in_process

FORMATS = ("PNG", "JPEG", "WEBP")
KINDS = "a PNG, JPEG or WebP"
MAX_SIDE, MAX_PIXELS = 8_192, 16 << 20
"""A picture has at most so many pixels on a side, and in all: 4096 × 4096."""
MAX_SCANS = 32
"""A progressive JPEG has at most so many scans, of which each goes over all pixels; encoders write about ten."""
MEMORY = 384 << 20
"""Reading a picture may take this many bytes beyond what the libraries take: 16 megapixels with their transparency four
times, and what is written."""
READ_LIMIT_S = 2.0
"""Reading a picture may take this much processor time: 16 megapixels with transparency take 0.7 s."""
LIMIT_S = 30.0
"""The whole process may take this long on a busy machine; writing 16 megapixels takes it a second."""


class Decoded(NamedTuple):
    """The size in pixels of a picture that was written."""

    width: int
    height: int


class _Refused(Exception):
    pass


async def decode(source: Path, target: Path, *, is_mask: bool = False) -> Decoded:
    """Write the picture at `source` as a PNG to `target`: turned as EXIF says, opaque, of 8 bits, without metadata.

    It is grey where it was grey, and RGB otherwise; what was transparent lies on white. Of a mask as OpenAI's clients
    send it only the transparency counts: it becomes white, and all else black. Raises `InvalidParameter` with
    the reason, `UnsupportedMediaType` for what is no PNG, JPEG or WebP.
    """
    answer = await read_in_process(
        "serve_app.jobs.picture_file", source, target, *["mask"] * is_mask,
        kind="a picture", seconds=LIMIT_S, processor_seconds=READ_LIMIT_S,
    )  # fmt: skip
    if answer.get("is_other"):
        raise UnsupportedMediaType(f"file: must be {KINDS} picture")
    return Decoded(**answer)


def main(source: str, target: str, kind: str = "") -> None:
    Image.preinit()
    limit_memory(MEMORY)
    sys.stdout.write(json.dumps(_decode(Path(source), Path(target), _mask if kind else _plain)) + "\n")


def _decode(source: Path, target: Path, read: Callable[[Image.Image], Image.Image]) -> dict[str, object]:
    signal.setitimer(signal.ITIMER_PROF, READ_LIMIT_S)  # when it is over, the kernel ends the process by SIGPROF
    Image.MAX_IMAGE_PIXELS = None  # `_check` knows the service's own limit
    try:
        with Image.open(source, formats=FORMATS) as image:
            _check(image, source.read_bytes())
            picture = read(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        return {"is_other": True}
    except _Refused as refused:
        return {"refused": str(refused)}
    except MemoryError:
        return {"refused": f"takes more than {MEMORY >> 20} MiB of memory to read"}
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of any kind for a damaged file
        if "MAX_TEXT" in str(error):
            return {"refused": "its metadata unpack to too many bytes; send it without them"}
        return {"refused": "is damaged or incomplete"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    picture.save(target, "png", compress_level=4)
    return {"width": picture.width, "height": picture.height}


def _check(image: Image.Image, content: bytes) -> None:
    """Check what the header says, before any pixel is read. Raises `_Refused`."""
    width, height = image.size
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        most = f"at most {MAX_SIDE} on a side and {MAX_PIXELS} in all"
        raise _Refused(f"has {width} × {height} pixels; {most}")
    if image.format != "MPO" and getattr(image, "is_animated", False):  # the other pictures of an MPO are previews
        raise _Refused("is animated; send one picture")
    if image.mode in ("CMYK", "YCCK"):
        raise _Refused("is in CMYK; send it in RGB or grey")
    if image.format == "PNG" and content[24] == 16:  # the bit depth of IHDR, PNG (third edition), 11.2.1
        raise _Refused("has 16 bits a channel; send it with 8")
    if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MAX_SCANS:  # no data of a scan has these bytes
        raise _Refused(f"has more than {MAX_SCANS} scans; save it as a baseline JPEG")


def _mask(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        raise _Refused("must be transparent where the image is drawn anew")
    return ImageOps.invert(image.convert("RGBA").getchannel("A"))


def _plain(image: Image.Image) -> Image.Image:
    """Return the picture in grey or RGB, with white below what is transparent, and nothing else."""
    is_grey = image.mode in ("1", "L", "LA")
    if image.has_transparency_data:
        image = image.convert("LA" if is_grey else "RGBA")
        ground = Image.new(image.mode, image.size, (255,) * len(image.getbands()))
        image = Image.alpha_composite(ground.convert("RGBA"), image.convert("RGBA"))
    plain = image.convert("L" if is_grey else "RGB")
    plain.info = {}
    return plain


if __name__ == "__main__":
    main(*sys.argv[1:])
