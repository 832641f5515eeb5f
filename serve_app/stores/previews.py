"""Small, short-lived pictures of unfinished images, for those who watch a job."""

import base64
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.stores.redis_keys import redis_key

LIFE = timedelta(seconds=30)
WATCHED_FOR = timedelta(seconds=10)
"""After a page asked for a job, its worker makes previews for this long; a job that nobody watches costs one read a look."""


class Preview(NamedTuple):
    """One image of a job as it was after so many steps."""

    step: int
    png: bytes


class PreviewStore:
    """Stores previews of images. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def watch(self, job_id: str) -> None:
        """Ask the job's worker for previews."""
        await self._redis.set(redis_key("preview_watched", job_id), "1", ex=WATCHED_FOR, nx=True)

    async def is_watched(self, job_id: str) -> bool:
        return bool(await self._redis.exists(redis_key("preview_watched", job_id)))

    async def put(self, job_id: str, previews: Mapping[int, Preview]) -> None:
        """Store the newest preview of images by their index."""
        pipeline = self._redis.pipeline()
        rows = {str(index): f"{it.step} {base64.b64encode(it.png).decode()}" for index, it in previews.items()}
        pipeline.hset(redis_key("preview", job_id), mapping=rows)
        pipeline.expire(redis_key("preview", job_id), LIFE)
        await pipeline.execute()

    async def get(self, job_id: str) -> Mapping[int, Preview]:
        """The newest preview of each image that has one, by its index."""
        rows: dict[str, str] = await self._redis.hgetall(redis_key("preview", job_id))
        return {int(index): _read(text) for index, text in rows.items()}


def _read(text: str) -> Preview:
    step, _, png = text.partition(" ")
    return Preview(int(step), base64.b64decode(png))
