"""Whether the addresses of a job's images still open."""

import time

from redis.asyncio import Redis

from serve_app.stores.script import Script

REMEMBERED_S, MOST_REMEMBERED = 1.0, 10_000


class ImageAccess:
    """Asks for the state of a job and of its account. May raise `StoreUnavailable`."""

    def __init__(self, redis: Redis) -> None:
        self._image_opens = Script(redis, "image_opens")
        self._opens: dict[str, float] = {}

    async def is_open(self, job_id: str) -> bool:
        """Whether addresses of the job's images still open: it exists, and its account is not disabled.

        One round trip; a yes is remembered for a second.
        """
        now = time.monotonic()
        if self._opens.get(job_id, 0.0) > now:
            return True
        if not await self._image_opens(job_id=job_id):
            return False
        if len(self._opens) >= MOST_REMEMBERED:
            self._opens.clear()
        self._opens[job_id] = now + REMEMBERED_S
        return True
