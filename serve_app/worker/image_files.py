"""Encodes images, and writes previews of a running job while somebody watches it."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from io import BytesIO
from typing import Any

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.requests import ImageFormat
from serve_app.jobs.previews import Preview, PreviewStore
from serve_app.marking.drawing_texts import A1111
from serve_app.worker.executor import Executor, Pixels

JPEG = {"quality": 95, "subsampling": "4:4:4"}
WEBP = {"quality": 95}
"""WebP is lossy here, since PNG has the exact pixels: lossless, it would be 7 % smaller and take twice as long."""


_NO_TEXTS: Mapping[str, str] = {}


def encode(
    pixels: Pixels,
    form: ImageFormat,
    *,
    quality: int | None = None,
    job_id: str | None = None,
    texts: Mapping[str, str] = _NO_TEXTS,
    xmp: str = "",
) -> bytes:
    """Encode pixels; the same arguments give the same bytes.

    A `job_id` is written next to the generator's name; then no two jobs give the same file. `texts` are those of
    `drawing_texts`, of which a JPEG or WebP takes A1111's alone; `xmp` is a packet.
    """
    if form is ImageFormat.PNG:
        return encode_png(pixels, job_id=job_id, texts=texts, xmp=xmp)
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = generator_name()
    if job_id is not None:
        exif[ExifTags.Base.ImageDescription] = f"Job {job_id}"
    if A1111 in texts:
        comment = b"UNICODE\0" + texts[A1111].encode("utf-16-be")
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    out = BytesIO()
    how: dict[str, Any] = (JPEG if form is ImageFormat.JPEG else WEBP) | ({"xmp": xmp.encode()} if xmp else {})
    if quality is not None:
        how["quality"] = quality
    Image.fromarray(pixels).save(out, form, exif=exif, **how)
    return out.getvalue()


def encode_png(
    pixels: Pixels, *, job_id: str | None = None, texts: Mapping[str, str] = _NO_TEXTS, xmp: str = ""
) -> bytes:
    """Encode pixels as a PNG, whose text chunks name the generator and, where it is given, the job."""
    text = PngInfo()
    if xmp:
        text.add_itxt("XML:com.adobe.xmp", xmp)
    for name, value in texts.items():
        text.add_text(name, value)
    if job_id is not None:
        text.add_text("Job", job_id)
    text.add_text("Software", generator_name())
    out = BytesIO()
    Image.fromarray(pixels).save(out, "png", pnginfo=text, compress_level=4)
    return out.getvalue()


@cache
def generator_name() -> str:
    return f"Atelier {version('atelier')}"


EVERY_S = 0.5
"""How often a running job's pictures are stored while somebody watches it."""
FIRST_STEP = 3
"""The first step that is shown: before it a picture is nothing but noise."""
LONGEST_SIDE = 64
"""Longest side of a preview, in pixels; pages scale it up."""


async def write_previews(
    job_id: str, run_ids: Sequence[str], executor: Executor, store: PreviewStore, pool: ThreadPoolExecutor
) -> None:
    """Store the newest picture of each run twice a second, until canceled."""
    loop, shown = asyncio.get_running_loop(), dict[int, int]()
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            if not await store.is_watched(job_id):
                continue
            fresh = await loop.run_in_executor(pool, _fresh, run_ids, executor, dict(shown))
            if fresh:
                await store.put(job_id, fresh)
                shown |= {index: preview.step for index, preview in fresh.items()}
        except StoreUnavailable:
            continue


def _fresh(run_ids: Sequence[str], executor: Executor, shown: dict[int, int]) -> dict[int, Preview]:
    """Return previews of the runs that have moved on since they were shown."""
    found: dict[int, Preview] = {}
    for index, run_id in enumerate(run_ids):
        latest = executor.unfinished(run_id, LONGEST_SIDE)
        if latest is not None and latest[0] >= FIRST_STEP and latest[0] != shown.get(index):
            found[index] = Preview(latest[0], encode_png(latest[1]))
    return found
