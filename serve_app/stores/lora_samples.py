"""Registered LoRAs that wait for a sample picture, and the jobs that drew one."""

from collections.abc import Mapping, Sequence
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
    """The LoRAs that wait for a sample; nothing depends on it, so a lost entry does no harm."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)
        self._take = Script(redis, "take_sample")

    async def ask(self, lora_id: str) -> None:
        """Have a sample of the LoRA drawn when there is nothing else to do."""
        seconds, microseconds = await self._redis.time()
        at = seconds * 1000 + microseconds // 1000
        await self._redis.zadd(redis_key("loras_sampling"), {lora_id: at}, nx=True)

    async def take(self, *, every: timedelta = EVERY) -> str:
        """Take the next LoRA off the list; '' if there is none, or if customers' jobs come first."""
        return await self._take(
            worker_life_ms=milliseconds(WORKER_LIFE), every_ms=milliseconds(every), life_ms=milliseconds(LIFE)
        )

    async def begun(self, lora_id: str, job_id: str) -> None:
        """Remember the job that draws the LoRA's sample."""
        await self._redis.hset(redis_key("loras_samples"), lora_id, job_id)

    async def jobs(self, lora_ids: Sequence[str]) -> Mapping[str, str]:
        """The ids of the jobs that drew samples, by LoRA; of LoRAs that have one. A job may be gone."""
        if not lora_ids:
            return {}
        found = await self._redis.hmget(redis_key("loras_samples"), lora_ids)
        return {lora_id: job_id for lora_id, job_id in zip(lora_ids, found, strict=True) if job_id}
