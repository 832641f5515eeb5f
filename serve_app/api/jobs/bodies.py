"""A job as it is: real states, resolved fields and seeds. What does not apply is absent, never null."""

from collections.abc import Callable
from typing import Any

from serve_app.api.answers import eta_text, failure_of, utc_text
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest, UpscaleRequest

UrlOf = Callable[[str], str]
"""From where storage keeps an image to an address a browser opens."""


def job_record(job: Job, url_of: UrlOf) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": job.id,
        "kind": job.kind,
        "interface": job.variant,
        "status": job.state,
        "progress": job.progress,
        "attempt": job.attempt,
        "created_at": utc_text(job.created_at),
        "request": _request(job.request),
    }
    if job.started_at is not None:
        record["started_at"] = utc_text(job.started_at)
    if job.finished_at is not None:
        record["finished_at"] = utc_text(job.finished_at)
    if job.finish_estimate is not None:
        record["estimated_completion_time"] = eta_text(job)
    if job.state is JobState.COMPLETED:
        record["images"] = _images(job, url_of)
    elif job.state.is_terminal:
        record["error"] = failure_of(job)
    return record


def _request(request: GenerationRequest | UpscaleRequest) -> dict[str, Any]:
    if isinstance(request, UpscaleRequest):
        return {"image_id": request.image_id, "scale_factor": request.scale_factor}
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "lora_id": request.lora_id,
        "lora_weight": request.lora_weight,
        "width": request.width,
        "height": request.height,
        "guidance_scale": request.guidance_scale,
        "steps": request.steps,
        "num_images": request.num_images,
    }


def _images(job: Job, url_of: UrlOf) -> list[dict[str, Any]]:
    found = [
        {
            "image_id": image.image_id,
            "url": url_of(image.image_uri),
            "width": image.width,
            "height": image.height,
            "size_bytes": image.size_bytes,
            "sha256": image.sha256,
        }
        for image in job.images
    ]
    if isinstance(job.request, GenerationRequest):
        for record, seed in zip(found, job.request.seeds, strict=True):
            record["seed"] = str(seed)  # text: JavaScript's numbers end at 2^53
    return found
