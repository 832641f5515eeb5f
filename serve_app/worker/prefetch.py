"""Prefetches adapters that the fleet has drawn with lately, before a job of this worker needs them."""

import asyncio
import logging
from datetime import timedelta

from serve_app.domain import metrics
from serve_app.domain.errors import AdapterUnavailable, StoreUnavailable
from serve_app.store.measures import is_cancelled
from serve_app.store.storage import free_bytes, in_storage_thread
from serve_app.worker.attempt import WorkerParts
from serve_app.worker.executor import Executor

log = logging.getLogger(__name__)

DRAWS = 8
"""One look considers this many adapters: of popular ones most are in memory already."""
LONGEST_PAUSE = timedelta(minutes=1)


def pause(every: timedelta, failures: int) -> timedelta:
    """Return the time until the next look, twice as long after each failure in a row, up to `LONGEST_PAUSE`."""
    return min(every * 2 ** min(failures, 10), max(every, LONGEST_PAUSE))


class AdapterPrefetch:
    """Reads one adapter at a time into memory that is free.

    No job depends on it: a failure is only logged. An adapter that was refused or is gone is not tried again.
    """

    def __init__(self, parts: WorkerParts, executor: Executor, *, worker: str) -> None:
        self._parts = parts
        self._executor = executor
        self._worker = worker
        self._refused: set[str] = set()

    async def run(self, every: timedelta) -> None:
        """Prefetch until canceled, through any failure."""
        failures = 0
        while not is_cancelled():
            try:
                await self.prefetch_one()
                failures = 0
            except Exception as error:  # noqa: BLE001
                failures += 1
                log.debug("worker %s: prefetching failed, trying again: %r", self._worker, error)
            await asyncio.sleep(pause(every, failures).total_seconds())

    async def prefetch_one(self) -> str | None:
        """Prefetch one recent adapter that is not here; return its LoRA, or None. Raises `StoreUnavailable`."""
        pool = self._executor.pool
        if await in_storage_thread(self._is_disk_short, doing="look at free space"):
            return None
        for lora_id, base_model in await self._parts.recent_adapters.sample(pool, DRAWS):
            weights = await self._fetch(lora_id, base_model)
            if weights is not None:
                self._parts.measures.count(metrics.ADAPTER_PREFETCHES, pool)
                await self._parts.recent_adapters.add_owner(pool, weights, self._worker)
                return lora_id
        return None

    def _is_disk_short(self) -> bool:
        """Return whether the disk that weights are stored on lacks its reserve, even without what can go."""
        settings = self._parts.settings
        if free_bytes(settings.data_dir) >= settings.disk_reserve:
            return False
        self._parts.weights.make_space()
        return free_bytes(settings.data_dir) < settings.disk_reserve

    async def _fetch(self, lora_id: str, base_model: str) -> str | None:
        """Raises `StoreUnavailable`."""
        if lora_id in self._refused:
            return None
        try:
            return await self._executor.prefetch(lora_id, base_model)
        except AdapterUnavailable as error:
            if isinstance(error.__cause__, StoreUnavailable):
                raise error.__cause__ from error
            self._refused.add(lora_id)
            log.info("worker %s: %s is not prefetched: %s", self._worker, lora_id, error.message)
            return None
