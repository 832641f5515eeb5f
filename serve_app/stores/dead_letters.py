"""Dead letters: jobs that failed for good."""

from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.jobs import Job
from serve_app.stores.job_reader import find_jobs
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script

Jobs = list[Job]  # `DeadLetters.list` hides the built-in name inside the class


class DeadLetters:
    """Failed jobs, for operators. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)
        self._requeue = Script(redis, "requeue_dead", rewrite)

    async def list(self, limit: int = 50) -> Jobs:
        """List failed jobs, the newest first."""
        return await find_jobs(self._redis, await self._redis.zrevrange(redis_key("dead"), 0, limit - 1))

    async def requeue(self, job_id: str) -> bool:
        """Queue a failed job again with all its attempts; False when it has not failed."""
        return bool(await self._requeue(job_id=job_id))

    async def drop(self, job_id: str) -> bool:
        """Take a job off the list; its record stays as it is. False when it is not on the list."""
        return bool(await self._redis.zrem(redis_key("dead"), job_id))
