"""Reports one worker's measurements to the operator's metrics."""

import asyncio
import logging

from serve_app.domain.metrics import WORKER_MEMORY
from serve_app.service.executor import Executor, LoadedModels, ReportsMemory, ReportsModels
from serve_app.service.resources import Resources
from serve_app.stores.measures import gauge_field, is_cancelled

log = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0
MOST_LORAS = 100
"""Named of one worker."""


async def report_forever(
    resources: Resources, executor: Executor, *, worker: str, every_s: float = REPORT_EVERY_S
) -> None:
    """Report until cancelled, through any failure, since no job depends on it."""
    while not is_cancelled():
        try:
            await report(resources, executor, worker=worker)
        except Exception as error:  # noqa: BLE001
            log.debug("worker %s: reporting failed, trying again: %r", worker, error)
        await asyncio.sleep(every_s)


async def report(resources: Resources, executor: Executor, *, worker: str) -> None:
    """Report once. Raises `StoreUnavailable`."""
    gauges = {metric.name: value for metric, value in executor.measure(resources.measures).items()}
    if isinstance(executor, ReportsMemory):
        gauges |= {gauge_field(WORKER_MEMORY, part.device, part.use): part.size_bytes for part in executor.memory()}
    loaded = executor.loaded_models() if isinstance(executor, ReportsModels) else LoadedModels((), ())
    await resources.measures.show(
        executor.kind,
        worker,
        gauges,
        base_models=loaded.base_models,
        loras=loaded.loras[:MOST_LORAS],
    )
    await resources.measures.send()
