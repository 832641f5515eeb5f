"""Reads a customer's picture in a process of limited memory and time, and writes it again as a PNG without metadata.

`python -m serve_app.jobs.picture_file SOURCE TARGET [mask]` prints one line of JSON: {"width": …, "height": …},
{"refused": reason} or {"is_other": what it is}.
"""

import json
import re
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ExifTags, Image, ImageChops, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from serve_app.domain.errors import UnsupportedMediaType
from serve_app.jobs.picture_colours import HighDynamicRange, profile_of, to_srgb
from serve_app.safetensors_file import limit_memory

FORMATS = ("PNG", "JPEG", "WEBP")
KINDS = "a PNG, JPEG or WebP"
MAX_SIDE, MAX_PIXELS = 8_192, 16 << 20
"""A stored picture has at most this many pixels on a side, and in all: 4096 × 4096. A larger one is halved."""
MAX_READ_SIDE, MAX_READ_PIXELS = 2 * MAX_SIDE, 50 << 20
"""A picture that is read has at most this many: cameras of 50 megapixels have up to 52 million."""
MAX_SCANS = 32
"""A progressive JPEG has at most this many scans, each of which goes over all pixels; encoders write about ten."""
MEMORY = 512 << 20
"""Reading a picture may take this many bytes beyond what the libraries take: enough for five copies of a WebP of 24
megapixels with transparency, whose decoder keeps two of its own."""
READ_LIMIT_S = 3.0
"""Reading a picture may take this much processor time: a PNG of 52 megapixels takes 0.9 s."""
LIMIT_S = 30.0
"""The whole process may take this long on a busy machine; writing 16 megapixels takes it a second."""


_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""A marker that begins a segment, or the end. No data of a scan has these bytes."""
_END = b"\xff\xd9"
_STROKES = b"maSk"
"""The name of a private chunk, which only this service reads."""
_NO_DATA = b"\xa5" * 64
_TURNS = dict(zip(range(2, 9), map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), strict=True))
"""How to turn a picture for each orientation that EXIF knows (CIPA DC-008, 4.6.5.1)."""


class Decoded(NamedTuple):
    """The size in pixels of a picture that was written."""

    width: int
    height: int


class _Refused(Exception):
    pass


async def decode(source: Path, target: Path, *, is_mask: bool = False) -> Decoded:
    """Write the picture at `source` as a PNG to `target`: in sRGB, turned as EXIF says, of 8 bits, without metadata.

    It is opaque, grey where it was grey, and RGB otherwise; what was transparent lies on white, and a chunk of its own
    keeps the transparency for `stored_mask`. Only the transparency of a mask as OpenAI's clients send it counts: it
    becomes white, and all else black. Raises `InvalidParameter` with the reason, `UnsupportedMediaType` for what is no
    PNG, JPEG or WebP.
    """
    from serve_app.store.limited_process import read_in_process  # brings asyncio, half of what the process would load

    answer = await read_in_process(
        "serve_app.jobs.picture_file", source, target, *["mask"] * is_mask,
        kind="a picture", seconds=LIMIT_S, processor_seconds=READ_LIMIT_S,
    )  # fmt: skip
    if "is_other" in answer:
        raise UnsupportedMediaType(f"file: must be {KINDS} picture{answer['is_other']}")
    return Decoded(**answer)


def main(source: str, target: str, kind: str = "") -> None:
    Image.preinit()
    limit_memory(MEMORY)
    sys.stdout.write(json.dumps(_decode(Path(source), Path(target), _mask if kind else _plain)) + "\n")


def _decode(source: Path, target: Path, read: Callable[[Image.Image, bytes], Image.Image]) -> dict[str, object]:
    signal.setitimer(signal.ITIMER_PROF, READ_LIMIT_S)  # when it is over, the kernel ends the process by SIGPROF
    Image.MAX_IMAGE_PIXELS = None  # `_check` knows the service's own limit
    content = source.read_bytes()
    try:
        content = _needed(content)
        with _opened(content) as image:
            _check(image, content)
            picture = _upright(read(_small_enough(image), content), image.info.get("exif"))
    except UnidentifiedImageError:
        is_heif = content[4:8] == b"ftyp"
        return {"is_other": ", and this is HEIC or AVIF; save it as a JPEG" if is_heif else ""}
    except _Refused as refused:
        return {"refused": str(refused)}
    except MemoryError:
        return {"refused": f"takes more than {MEMORY >> 20} MiB of memory to read"}
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of any kind for a damaged file
        if "MAX_TEXT" in str(error):
            return {"refused": "its metadata unpack to too many bytes; send it without them"}
        is_webp = content.startswith(b"RIFF")  # its decoder does not tell a lack of memory from damage
        return {"refused": "is damaged or incomplete" + ", or a WebP of more than 24 megapixels" * is_webp}
    signal.setitimer(signal.ITIMER_PROF, 0)
    picture, strokes = _opaque(picture)
    picture.info = {}
    picture.save(target, "png", compress_level=4, pnginfo=strokes)
    return {"width": picture.width, "height": picture.height}


def _opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content), formats=FORMATS)


def _needed(content: bytes) -> bytes:
    """Return a file without what viewers ignore: what follows a JPEG's end, and damaged metadata of a PNG."""
    if content.startswith(b"\xff\xd8"):
        return _until_its_end(content)
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content[:8] + b"".join(_sound_chunks(content))
    return content


def _until_its_end(content: bytes) -> bytes:
    """Return a JPEG up to the end of its first picture, with the marker of the end if nothing else is missing.

    Markers are read as libjpeg reads them, which takes those below SOF0 for empty. Raises `_Refused`.
    """
    at = scans = 0
    while found := _SEGMENT.search(content, at):
        if found[0] == _END:
            return content[: found.end()]
        scans += found[0] == b"\xff\xda"
        if scans > MAX_SCANS:
            raise _Refused(f"has more than {MAX_SCANS} scans; save it as a baseline JPEG")
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2])
    content = content.removesuffix(b"\xff")
    ended = [_opened(content + more + _END) for more in (b"", _NO_DATA)]
    for image in ended:  # a file that lacks data decodes to whatever follows it
        _check(image, content)
        image.draft(None, (image.width // 2, image.height // 2))  # a progressive one has fine details last
    if scans == 0 or ended[0] != ended[1]:
        raise _Refused("is damaged or incomplete")
    return content + _END


def _sound_chunks(content: bytes) -> Iterator[bytes]:
    """Yield the chunks of a PNG but for ancillary ones that are damaged (PNG, third edition, 13.1)."""
    at = 8
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4])
        chunk = content[at:end]
        is_ancillary = len(chunk) > 4 and chunk[4] & 0x20
        if not is_ancillary or zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:]):
            yield chunk
        at = end


def _check(image: Image.Image, content: bytes) -> None:
    """Check what the header says, before any pixel is read. Raises `_Refused`."""
    width, height = image.size
    if max(width, height) > MAX_READ_SIDE or width * height > MAX_READ_PIXELS:
        most = f"at most {MAX_READ_SIDE} on a side and {MAX_READ_PIXELS} in all"
        raise _Refused(f"has {width} × {height} pixels; {most}")
    if image.format != "MPO" and getattr(image, "is_animated", False):  # the other pictures of an MPO are previews
        raise _Refused("is animated; send one picture")
    if image.format == "PNG" and content[24] == 16:  # the bit depth of IHDR, PNG (third edition), 11.2.1
        raise _Refused("has 16 bits a channel; send it with 8")


def _small_enough(image: Image.Image) -> Image.Image:
    """Return the pixels in mode L, LA, RGB, RGBA or CMYK, of half the size where they are too many to be stored."""
    if _is_large(image):  # libjpeg halves while it reads, and other formats ignore this
        image.draft(None, (image.width // 2, image.height // 2))
    image.load()
    if image.has_transparency_data:
        mode = "LA" if image.mode in ("1", "L", "LA") else "RGBA"
    else:
        mode = {"1": "L", "L": "L", "CMYK": "CMYK"}.get(image.mode, "RGB")
    pixels = image if image.mode == mode else image.convert(mode)
    return pixels.reduce(2) if _is_large(pixels) else pixels


def _is_large(image: Image.Image) -> bool:
    return image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE


def _upright(image: Image.Image, exif: bytes | None) -> Image.Image:
    """Turn a picture as its EXIF says, but not its XMP, which browsers do not ask; damaged EXIF says nothing."""
    try:
        found = Image.Exif()
        found.load(exif or b"")
        turn = _TURNS.get(found.get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - Pillow raises errors of any kind for damaged EXIF
        return image
    return image if turn is None else image.transpose(turn)


def _mask(image: Image.Image, _content: bytes) -> Image.Image:
    if image.mode not in ("LA", "RGBA"):
        raise _Refused("must be transparent where the image is redrawn")
    return ImageOps.invert(image.getchannel("A"))


def _plain(image: Image.Image, content: bytes) -> Image.Image:
    try:
        profile = profile_of(image, content)
    except HighDynamicRange:
        raise _Refused("is in HDR (PQ, HLG) or video colours; save it in sRGB") from None
    shown = image if profile is None else to_srgb(image, profile)
    if shown.mode == "CMYK":
        raise _Refused("is in CMYK without a colour profile that can be read; send it in RGB or grey")
    return shown


def _opaque(image: Image.Image) -> tuple[Image.Image, PngInfo | None]:
    """Return a picture on white, and the chunk for `stored_mask` of one that was transparent."""
    if image.mode not in ("LA", "RGBA"):
        return image, None
    plain, alpha = "L" if image.mode == "LA" else "RGB", image.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return image.convert(plain), None
    strokes = PngInfo()
    strokes.add(_STROKES, zlib.compress(ImageChops.multiply(image.convert("L"), alpha).tobytes(), 4))
    ground = Image.new(plain, image.size, "white")
    ground.paste(image.convert(plain), mask=alpha)
    return ground, strokes


def stored_mask(image: Image.Image) -> Image.Image:
    """Return a stored picture as a mask: its luminance, on black where it was transparent."""
    chunks: list[tuple[Any, ...]] = getattr(image, "private_chunks", [])
    strokes = next((chunk[1] for chunk in chunks if chunk[0] == _STROKES), None)
    return image.convert("L") if strokes is None else Image.frombytes("L", image.size, zlib.decompress(strokes))


if __name__ == "__main__":
    main(*sys.argv[1:])
