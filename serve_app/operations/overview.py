"""Reads the state of queue, workers, adapters and failures from Redis, and whether the service is ready for jobs."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from serve_app.domain import metrics
from serve_app.domain.errors import Overloaded, StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.domain.metrics import Metric
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.history import DeadLetters
from serve_app.jobs.images import ImageStore
from serve_app.jobs.workers import WorkerStatus
from serve_app.loras.catalog import CatalogReader
from serve_app.settings import Settings
from serve_app.store.measures import Measures, MemoryReserve, ShownWorker
from serve_app.store.storage import Space

MOST_ADAPTERS, MOST_FAILURES = 15, 8


async def overview(
    measures: Measures, stats: QueueStats, dead_letters: DeadLetters, workers: WorkerStatus, names: Mapping[str, str]
) -> dict[str, Any]:
    """Read facts for an operator; `names` are adapters', by their weights' digest. Raises `StoreUnavailable`."""
    measured = await measures.measured()
    counts = await stats.counts()
    failed = await dead_letters.list(MOST_FAILURES)
    return {
        "queue": {str(kind): await _queue(stats, kind) for kind in JobKind},
        "workers": [row for kind in JobKind for row in await _workers(measures, kind)],
        "starting": {str(kind): words for kind in JobKind if (words := await workers.starting(kind)) is not None},
        "start_failures": {
            str(kind): failure for kind in JobKind if (failure := await workers.failure(kind)) is not None
        },
        "adapters": {
            "waiting": [
                {"name": names.get(group, group[:12]), "jobs": jobs}
                for group, jobs in await stats.waiting_weights(JobKind.GENERATION, limit=MOST_ADAPTERS)
            ],
            "loads": _total(measured, metrics.ADAPTER_LOADS, besides="sum"),
            "evictions": _total(measured, metrics.ADAPTER_EVICTIONS),
        },
        "jobs": {event: counts.get(event, 0) for event in metrics.EVENTS},
        "failures": {
            "by_code": _by_last_label(measured, metrics.JOB_FAILURES),
            "dead": await stats.dead(),
            "newest": [
                {
                    "id": job.id,
                    "at": job.finished_at.isoformat() if job.finished_at else "",
                    "code": job.failure.code if job.failure else "",
                    "message": job.failure.message if job.failure else "",
                }
                for job in failed
            ],
        },
    }


async def adapter_names(catalog: CatalogReader) -> dict[str, str]:
    return {adapter.sha256: adapter.name for adapter in await catalog.all()}


async def _queue(stats: QueueStats, kind: JobKind) -> dict[str, float]:
    backlog = await stats.backlog(kind)
    return {
        "ready": backlog.ready,
        "running": backlog.leased,
        "delayed": backlog.delayed,
        "backlog_seconds": round(backlog.seconds, 1),
        "oldest_seconds": round(backlog.oldest_age_s, 1),
    }


async def _workers(measures: Measures, kind: JobKind) -> list[dict[str, Any]]:
    shown = await measures.shown(kind)
    gauges = {
        "runs": metrics.RUNS,
        "runs_limit": metrics.RUNS_LIMIT,
        "adapters": metrics.ADAPTERS_RESIDENT,
        "gpu_bytes": metrics.GPU_MEMORY,
        "gpu_bytes_used": metrics.GPU_MEMORY_USED,
    }
    return [
        {"name": worker.name, "kind": str(kind)}
        | {word: round(worker.gauges[metric.name]) for word, metric in gauges.items() if metric.name in worker.gauges}
        | ({"memory": memory} if (memory := _memory(worker)) else {})
        for worker in sorted(shown, key=lambda each: each.name)
    ]


def _memory(worker: ShownWorker) -> dict[str, dict[str, int]]:
    """Return a worker's bytes by device and use."""
    found: dict[str, dict[str, int]] = {}
    for field, value in worker.gauges.items():
        name, *labels = field.split("|")
        if name == metrics.WORKER_MEMORY.name:
            device, use = labels
            found.setdefault(device, {})[use] = round(value)
    return found


def _total(measured: Mapping[str, float], metric: Metric, *, besides: str = "") -> int:
    fields = (name.split("|") for name in measured)
    return round(sum(measured["|".join(f)] for f in fields if f[0] == metric.name and f[-1] != besides))


def _by_last_label(measured: Mapping[str, float], metric: Metric) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, value in measured.items():
        first, *labels = name.split("|")
        if first == metric.name:
            sums[labels[-1]] = sums.get(labels[-1], 0) + round(value)
    return sums


READY_TIMEOUT_S = 5.0
LONGEST_START_S = 600
"""If work has waited for this many seconds without a sign of any worker, none is starting."""
OK, DOWN, BUSY = "ok", "down", "busy"
"""A service that is busy is ready: taken out of the balance, it would leave its load to the others."""
IDLE, STARTING, UNWRITABLE = "scaled to zero", "starting", "cannot be written"
DISK, MEMORY, STORAGE = "disk below its reserve", "Redis at its memory limit", "storage cannot be written"

KeepsWorker = Callable[[JobKind], Awaitable[bool]]
"""Tells whether the deployment keeps a worker of this kind even while there is no work."""


async def never(_kind: JobKind) -> bool:
    return False


class Readiness(NamedTuple):
    """What the service can do now."""

    states: Mapping[str, str]
    """Part → its state; only an operator is shown it."""
    reason: str
    """What keeps new jobs out, or from being completed, in words; empty while they are accepted."""

    @property
    def answers_polls(self) -> bool:
        return self.states["redis"] != DOWN

    @property
    def is_ready(self) -> bool:
        """Whether polls are answered and accepted jobs will be worked on."""
        return self.answers_polls and self.states["generator"] in (OK, IDLE, BUSY)


async def readiness(
    stats: QueueStats,
    images: ImageStore,
    space: Space,
    workers: WorkerStatus,
    keeps_worker: KeepsWorker,
    settings: Settings,
) -> Readiness:
    """Ask every part, each within a limit of time."""
    turn_s = READY_TIMEOUT_S + settings.longest_redis_wait.total_seconds()
    redis, reasons = await asyncio.gather(
        _answers(stats.backlog(JobKind.GENERATION), within_s=turn_s), what_keeps_jobs_out(images, space)
    )
    states = {"redis": redis, "storage": UNWRITABLE if STORAGE in reasons else OK}
    if redis == DOWN:
        return Readiness(states, "Redis does not answer")
    generator = await _generator(stats, workers, keeps_worker)
    return Readiness({**states, "generator": generator}, ", ".join(reasons))


async def what_keeps_jobs_out(images: ImageStore, space: Space) -> list[str]:
    """Name what keeps new jobs from being accepted, or completed, by a service whose Redis answers."""
    disk, is_full, is_writable = await asyncio.gather(
        _answers(space.disk.check(), within_s=READY_TIMEOUT_S), _is_redis_full(space.memory), images.is_writable()
    )
    found = {DISK: disk == DOWN, MEMORY: is_full, STORAGE: not is_writable}
    return [reason for reason, holds in found.items() if holds]


async def _is_redis_full(reserve: MemoryReserve) -> bool:
    try:
        memory = await reserve.read()
    except (Overloaded, StoreUnavailable):
        return False
    return memory is not None and memory.is_short


async def _generator(stats: QueueStats, workers: WorkerStatus, keeps_worker: KeepsWorker) -> str:
    """Tell from Redis whether jobs will be worked on.

    A worker seen in the last minute says yes. Else a worker that failed to start, after the last that could, says no.
    One that starts says how far it is. Where none has failed, it depends on what the deployment promises: of at least one replica one is missing, and of
    none until there is work, work that has waited long says that none comes.
    """
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            if await workers.is_any_alive(JobKind.GENERATION):
                return OK
            failure, starting = [await ask(JobKind.GENERATION) for ask in (workers.failure, workers.starting)]
            waiting = (await stats.backlog(JobKind.GENERATION)).oldest_age_s
            is_kept = await keeps_worker(JobKind.GENERATION)
    except Overloaded:
        return BUSY
    except (StoreUnavailable, TimeoutError):
        return DOWN
    if failure is not None:
        return f"cannot start: {failure}" + ("" if starting is None else f"; another try: {starting}")
    if not is_kept and waiting <= LONGEST_START_S:
        return IDLE
    return "none has started" if starting is None else f"{STARTING}: {starting}"


async def _answers(probe: Coroutine[Any, Any, object], *, within_s: float) -> str:
    try:
        async with asyncio.timeout(within_s):
            await probe
    except Overloaded:
        return BUSY
    except (StoreUnavailable, TimeoutError):
        return DOWN
    return OK
