"""Reads the state of queue, workers, adapters and failures, from Redis alone."""

from collections.abc import Mapping
from typing import Any

from serve_app.domain import metrics
from serve_app.domain.jobs import JobKind
from serve_app.domain.metrics import Metric
from serve_app.service.resources import Resources
from serve_app.stores.measures import ShownWorker

MOST_ADAPTERS, MOST_FAILURES = 15, 8


async def overview(resources: Resources, names: Mapping[str, str]) -> dict[str, Any]:
    """Read facts for an operator. Raises `StoreUnavailable`.

    `names` are of adapters, by the digest of their weights.
    """
    measured = await resources.measures.measured()
    counts = await resources.queue_stats.counts()
    failed = await resources.dead_letters.list(MOST_FAILURES)
    return {
        "queue": {str(kind): await _queue(resources, kind) for kind in JobKind},
        "workers": [row for kind in JobKind for row in await _workers(resources, kind)],
        "start_failures": {
            str(kind): failure for kind in JobKind if (failure := await resources.workers.failure(kind)) is not None
        },
        "adapters": {
            "waiting": [
                {"name": names.get(group, group[:12]), "jobs": jobs}
                for group, jobs in await resources.queue_stats.waiting_weights(JobKind.GENERATION, limit=MOST_ADAPTERS)
            ],
            "loads": _total(measured, metrics.ADAPTER_LOADS, besides="sum"),
            "evictions": _total(measured, metrics.ADAPTER_EVICTIONS),
        },
        "jobs": {event: counts.get(event, 0) for event in metrics.EVENTS},
        "failures": {
            "by_code": _by_last_label(measured, metrics.JOB_FAILURES),
            "dead": await resources.queue_stats.dead(),
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


async def adapter_names(resources: Resources) -> dict[str, str]:
    return {adapter.sha256: adapter.name for adapter in await resources.catalog.all()}


async def _queue(resources: Resources, kind: JobKind) -> dict[str, float]:
    backlog = await resources.queue_stats.backlog(kind)
    return {
        "ready": backlog.ready,
        "running": backlog.leased,
        "delayed": backlog.delayed,
        "backlog_seconds": round(backlog.seconds, 1),
        "oldest_seconds": round(backlog.oldest_age_s, 1),
    }


async def _workers(resources: Resources, kind: JobKind) -> list[dict[str, Any]]:
    shown = await resources.measures.shown(kind)
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
