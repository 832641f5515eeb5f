"""Variant B's answers: exactly the fields its tables name for each state; what does not apply is absent, never null."""

from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

from serve_app.api.answers import failure_of, time_left, utc_text
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import Job, JobState

UrlOf = Callable[[str], str]
"""From where storage keeps an image to an address a browser opens."""


def acknowledgement(job: Job) -> dict[str, Any]:
    """`queued`, whatever has happened since; the estimate is in whole seconds, at least one."""
    seconds = time_left(job).total_seconds()
    return {"run_id": job.id, "status": "queued", "estimated_time": max(1, ceil(seconds))}


def run_record(job: Job, url_of: UrlOf) -> dict[str, Any]:
    """The record as this variant shows it: `progress` always, `image_url` only when completed."""
    if job.state is JobState.COMPLETED:
        return {"run_id": job.id, "status": "completed", "progress": 100, "image_url": url_of(job.images[0].image_uri)}
    if job.state.is_terminal:
        return {"run_id": job.id, "status": "failed", "progress": job.progress, "error": failure_of(job)}
    status = "queued" if job.state is JobState.QUEUED else "processing"
    return {"run_id": job.id, "status": status, "progress": job.progress}


def models_list(adapters: Iterable[Adapter]) -> dict[str, Any]:
    return {"models": [_model(adapter) for adapter in adapters]}


def _model(adapter: Adapter) -> dict[str, Any]:
    return {
        "id": adapter.id,
        "name": adapter.name,
        "description": adapter.description,
        "created_at": utc_text(adapter.created_at),
    }
