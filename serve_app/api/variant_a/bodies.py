"""Variant A's answers: exactly the fields its tables name for each state; what does not apply is absent, never null."""

from collections.abc import Callable
from typing import Any

from serve_app.api.answers import eta_text, failure_of, utc_text
from serve_app.domain.jobs import Job, JobState, StoredImage

UrlOf = Callable[[str], str]
"""From where storage keeps an image to an address a browser opens."""


def acknowledgement(job: Job) -> dict[str, Any]:
    return {
        "request_id": job.id,
        "status": "processing",
        "estimated_completion_time": eta_text(job),
    }


def status_record(job: Job, url_of: UrlOf) -> dict[str, Any]:
    """The record as this variant shows it: waiting is `processing`, and every end without images is `failed`."""
    if job.state is JobState.COMPLETED:
        return _completed(job, url_of)
    if job.state.is_terminal:
        return {"request_id": job.id, "status": "failed", "error": failure_of(job)}
    return {
        "request_id": job.id,
        "status": "processing",
        "progress": job.progress,
        "estimated_completion_time": eta_text(job),
    }


def _completed(job: Job, url_of: UrlOf) -> dict[str, Any]:
    assert job.finished_at is not None, job.id
    return {
        "request_id": job.id,
        "status": "completed",
        "images": [_image(image, url_of) for image in job.images],
        "completed_at": utc_text(job.finished_at),
    }


def _image(image: StoredImage, url_of: UrlOf) -> dict[str, Any]:
    return {"image_id": image.image_id, "url": url_of(image.image_uri), "width": image.width, "height": image.height}
