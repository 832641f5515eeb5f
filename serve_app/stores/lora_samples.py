"""Which registered LoRAs wait for a sample picture."""

from datetime import timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.durations import milliseconds
from serve_app.stores.job_queue import WORKER_LIFE
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Script

EVERY = timedelta(seconds=10)
"""Between two samples: a thousand LoRAs at once are no load."""
LIFE = timedelta(days=1)
"""Of the wish for one, on a service that is never idle."""


class LoraSamples:
    """A list of LoRAs. Nothing depends on it: a sample that is lost was never promised."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)
        self._take = Script(redis, "take_sample")

    async def ask(self, lora_id: str) -> None:
        """Have a sample of the LoRA drawn when there is nothing else to do."""
        seconds, microseconds = await self._redis.time()
        at = seconds * 1000 + microseconds // 1000
        await self._redis.zadd(redis_key("loras_sampling"), {lora_id: at}, nx=True)

    async def take(self, *, every: timedelta = EVERY) -> str:
        """The LoRA whose turn it is, taken from the list; empty where none is, or where customers' jobs come first."""
        return await self._take(
            worker_life_ms=milliseconds(WORKER_LIFE), every_ms=milliseconds(every), life_ms=milliseconds(LIFE)
        )
