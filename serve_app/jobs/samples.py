"""Draws sample pictures of registered LoRAs, as jobs of their account while nothing else waits.

Such a job counts neither against the account's plan nor as its usage, and its image goes like that of every other job.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from serve_app.accounts.accounts import AccountStore
from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import milliseconds
from serve_app.domain.errors import Forbidden, QueueFull
from serve_app.domain.jobs import WORKER_LIFE, JobKind, NewJob, StoredImage, new_job_id
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.jobs.history import JobReader
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.queue import JobQueue
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script
from serve_app.store.storage import Space

_log = logging.getLogger(__name__)

EVERY = timedelta(seconds=10)
"""Two samples are at least this far apart, so that a thousand new LoRAs are no load."""
LIFE = timedelta(days=1)
"""How long a sample is wanted before it is drawn even though other jobs wait."""


class LoraSamples:
    """The LoRAs that wait for a sample; nothing depends on it, so a lost entry does no harm."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._take = Script(redis, "jobs/take_sample")

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
        await self._redis.hset(redis_key("loras_samples"), lora_id, job_id)

    async def jobs(self, lora_ids: Sequence[str]) -> Mapping[str, str]:
        """Return the job that drew each LoRA's sample, by LoRA, where there was one. A job may be gone by now."""
        if not lora_ids:
            return {}
        found = await self._redis.hmget(redis_key("loras_samples"), lora_ids)
        return {lora_id: job_id for lora_id, job_id in zip(lora_ids, found, strict=True) if job_id}


PROMPT = "purple mountains under a black sky with a yellow moon"
STEPS, SEED = 20, 1
LIGHT = 1e6
"""A sample has so large a share of the queue that its cost delays no later job of its account."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDrawing:
    """Submits the jobs that draw samples."""

    settings: Settings
    waiting: LoraSamples
    catalog: CatalogReader
    applied_catalog: AppliedCatalog
    accounts: AccountStore
    queue: JobQueue
    space: Space
    moderation: Moderation

    async def draw_next(self, *, every: timedelta = EVERY) -> str:
        """Submit the next sample, if nothing waits; return its job's id, or an empty text."""
        lora_id = await self.waiting.take(every=every)
        adapter = await self.catalog.adapter(lora_id) if lora_id else None
        if adapter is None or not self.settings.lora_samples:
            return ""
        owner = await self.accounts.get(adapter.owner)
        if owner is None or owner.disabled:
            return ""
        job_id = new_job_id(JobKind.GENERATION)
        steps, guidance = adapter.recommended(await self.applied_catalog.applied_base_models())
        prompt, steps = ", ".join((PROMPT, *adapter.trigger_words)), min(steps or STEPS, STEPS)
        request = GenerationRequest(prompt=prompt, loras=(LoraUse(adapter.id),), steps=steps, seeds=(SEED,))
        if guidance is not None:
            request = replace(request, guidance_scale=guidance)
        verdict = await self.moderation.prompt(
            account_id=owner.id, job_id=job_id, prompt=request.prompt, negative_prompt=""
        )
        if not verdict.allowed:
            return ""
        try:
            await self.space.check()
            await self.queue.accept(
                NewJob(
                    job_id=job_id,
                    variant=Variant.A,
                    account_id=owner.id,
                    request=request,
                    queue_share=LIGHT,
                    loras=request.loras,
                    is_sample=True,
                )
            )
        except (Forbidden, QueueFull) as refused:
            _log.info("no sample of %s: %s", adapter.id, refused.message)
            return ""
        await self.waiting.begun(adapter.id, job_id)
        return job_id


async def find_pictures(
    samples: LoraSamples, jobs: JobReader, adapters: Sequence[Adapter]
) -> Mapping[str, StoredImage]:
    """Return the drawn samples by LoRA. Everybody who may use a LoRA may see its sample."""
    owners = {adapter.id: adapter.owner for adapter in adapters if adapter.owner}
    drawn = await samples.jobs(list(owners))
    made = await jobs.find_many(list(drawn.values()))
    found = {lora_id: made[job_id] for lora_id, job_id in drawn.items() if job_id in made}
    return {each: job.images[0] for each, job in found.items() if job.images and job.account_id == owners[each]}
