"""Thumbnails: small WebP copies of images, made when first looked at and kept beside them in storage."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

from PIL import Image

from serve_app.domain.errors import NotFound, StoreUnavailable
from serve_app.service.resources import Resources
from serve_app.stores.images import thumbnail_uri

_log = logging.getLogger(__name__)

LONGEST_SIDE = 320
"""In pixels: twice the width at which a page shows it."""
QUALITY = 80
_pool = ThreadPoolExecutor(1, thread_name_prefix="thumbnails")  # an upscaled image takes 0.3 s: one core at most


async def thumbnail(resources: Resources, image_uri: str) -> bytes:
    """Return the WebP thumbnail of a stored image. Raises `NotFound`, `StoreUnavailable`."""
    uri = thumbnail_uri(image_uri)
    try:
        return await resources.images.get(uri)
    except NotFound:
        png = await resources.images.get(image_uri)
    webp = await asyncio.get_running_loop().run_in_executor(_pool, shrink, png)
    try:
        await resources.disk.check()
        await resources.images.put(resources.images.name(uri), webp)
    except StoreUnavailable as error:
        _log.warning("a thumbnail was not kept: %s", error)
    return webp


def thumbnail_size(width: int, height: int) -> tuple[int, int]:
    """Return the thumbnail's size for an image of this size; a small image keeps its own."""
    scale = min(1.0, LONGEST_SIDE / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def shrink(png: bytes) -> bytes:
    with Image.open(BytesIO(png), formats=["PNG"]) as image:
        small = image.convert("RGB").resize(thumbnail_size(*image.size), Image.Resampling.LANCZOS, reducing_gap=2.0)
    out = BytesIO()
    small.save(out, "webp", quality=QUALITY)
    return out.getvalue()
