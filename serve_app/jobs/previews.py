"""Keeps small pictures: short-lived previews of unfinished images, and WebP thumbnails of stored ones.

A thumbnail is made when it is first looked at, and kept beside its image in storage.
"""

import asyncio
import base64
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import BytesIO
from typing import NamedTuple

from serve_app.domain.errors import NotFound, StoreUnavailable
from serve_app.domain.requests import ImageFormat
from serve_app.jobs.images import ImageStore, thumbnail_uri
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.storage import DiskReserve

LIFE = timedelta(seconds=30)
WATCHED_FOR = timedelta(seconds=10)
"""A worker makes previews of a job for this long after somebody asked for them."""
_STORED = "stored"
"""This field, next to those of the images, counts the writes, by which `changes.lua` knows new ones."""


class Preview(NamedTuple):
    """One image of a job as it was after `step` steps."""

    step: int
    png: bytes


class PreviewStore:
    """Stores previews of images. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def watch(self, *job_ids: str) -> None:
        """Ask the workers of these jobs for previews, from now on for `WATCHED_FOR`."""
        pipeline = self._redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.set(redis_key("preview_watched", job_id), "1", ex=WATCHED_FOR)
        await pipeline.execute()

    async def is_watched(self, job_id: str) -> bool:
        return bool(await self._redis.exists(redis_key("preview_watched", job_id)))

    async def put(self, job_id: str, previews: Mapping[int, Preview]) -> None:
        """Store the newest preview of images by their index."""
        pipeline = self._redis.pipeline()
        rows = {str(index): f"{it.step} {base64.b64encode(it.png).decode()}" for index, it in previews.items()}
        pipeline.hset(redis_key("preview", job_id), mapping=rows)
        pipeline.hincrby(redis_key("preview", job_id), _STORED, 1)
        pipeline.expire(redis_key("preview", job_id), LIFE)
        await pipeline.execute()

    async def get(self, job_id: str) -> Mapping[int, Preview]:
        """Return the newest preview of each image that has one, by the image's index."""
        return read_previews(await self._redis.hgetall(redis_key("preview", job_id)))


def read_previews(fields: Mapping[str, str]) -> Mapping[int, Preview]:
    """Read the previews of images, as they are stored, by their index."""
    stored = {index: text.split(" ") for index, text in fields.items() if index != _STORED}
    return {int(index): Preview(int(step), base64.b64decode(png)) for index, (step, png) in stored.items()}


_log = logging.getLogger(__name__)

LONGEST_SIDE = 320
"""The longest side has this many pixels, twice the width at which a page shows it."""
QUALITY = 80
_pool = ThreadPoolExecutor(1, thread_name_prefix="thumbnails")  # One core at most: an upscaled image takes 0.3 s.


async def thumbnail(images: ImageStore, disk: DiskReserve, image_uri: str) -> bytes:
    """Return the WebP thumbnail of a stored image. Raises `NotFound`, `StoreUnavailable`."""
    uri = thumbnail_uri(image_uri)
    try:
        return await images.get(uri)
    except NotFound:
        content = await images.get(image_uri)
    webp = await asyncio.get_running_loop().run_in_executor(_pool, shrink, content)
    try:
        await disk.check()
        await images.put(images.name(uri), webp)
    except StoreUnavailable as error:
        _log.warning("a thumbnail was not kept: %s", error)
    return webp


def thumbnail_size(width: int, height: int) -> tuple[int, int]:
    """Return the thumbnail's size for an image of this size; a small image keeps its own."""
    scale = min(1.0, LONGEST_SIDE / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def shrink(content: bytes) -> bytes:
    from PIL import Image  # Importing it takes a while, for which commands need not wait.

    with Image.open(BytesIO(content), formats=[each.upper() for each in ImageFormat]) as image:
        small = image.convert("RGB").resize(thumbnail_size(*image.size), Image.Resampling.LANCZOS, reducing_gap=2.0)
    out = BytesIO()
    small.save(out, "webp", quality=QUALITY)
    return out.getvalue()
