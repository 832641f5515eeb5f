"""Says in words what pages show of a job: its state, why it failed, its parameters and how long it took."""

from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from serve_app.api.responses import failure_of
from serve_app.domain.durations import measured_duration
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest

STATES: Mapping[JobState, str] = {
    JobState.QUEUED: "Waiting",
    JobState.RUNNING: "Running",
    JobState.COMPLETED: "Done",
    JobState.FAILED: "Failed",
    JobState.CANCELED: "Canceled",
    JobState.EXPIRED: "Expired",
}
_ADVICE: Mapping[FailureCode, str] = {
    FailureCode.GENERATION_FAILED: "Try again; if it keeps failing, send the job's id to the operator of this service.",
    FailureCode.TIMEOUT: "It took longer than this service allows. Try fewer steps or a smaller size.",
    FailureCode.CANCELED: "",
    FailureCode.EXPIRED: "It waited in the queue longer than this service allows. Try again later.",
    FailureCode.LORA_UNAVAILABLE: "The LoRA was removed, or is no longer shared with this account. Choose another.",
    FailureCode.OUT_OF_MEMORY: "The device ran out of memory. Try a smaller size or fewer images.",
}


MARK_NAMES: Mapping[str, str] = {"xmp": "XMP", "c2pa": "a C2PA manifest", "watermark": "a watermark"}


class Part(NamedTuple):
    """A row of a table: a label, and what it says, which may be an id, or have one beside it."""

    label: str
    text: str
    is_id: bool = False
    id: str = ""


class FailureWords(NamedTuple):
    code: str
    message: str
    advice: str


def title(job: Job) -> str:
    if isinstance(job.request, GenerationRequest):
        return job.request.prompt
    if isinstance(job.request, UpscaleRequest):
        return f"An image enlarged {job.request.scale_factor} times"
    return "A request that this version of the service cannot read"


def failure_text(job: Job) -> FailureWords | None:
    """Explain why a job ended without images, and what may help; None for any other job."""
    if job.state in (JobState.QUEUED, JobState.RUNNING, JobState.COMPLETED):
        return None
    failure = failure_of(job)
    message = failure.message[:1].upper() + failure.message[1:].removesuffix(".") + "."
    return FailureWords(failure.code, message, _ADVICE[failure.code])


def parameters(job: Job, lora_names: Mapping[str, str]) -> list[Part]:
    request = job.request
    if isinstance(request, UpscaleRequest):
        return [
            Part("Source image", request.image_id, is_id=True),
            Part("Enlarged", f"{request.scale_factor} times"),
            Part("From", f"{request.source_width} × {request.source_height} pixels"),
            Part("To", f"{request.width} × {request.height} pixels"),
        ]
    if request is None:
        return []
    named = [(f"LoRA {lora_names.get(lora.id, 'no longer available')}", lora) for lora in request.loras]
    parts = [Part(label, f"weight {lora.weight:g}", id=lora.id) for label, lora in named]
    if request.base_model:
        parts.append(Part("Base model", request.base_model))
    if request.image is not None:
        parts += [
            Part("Begun from", request.image.image_id, is_id=True),
            Part("Redrawn", f"{100 * request.strength:g} %"),
        ]
    if request.mask is not None:
        parts.append(Part("Masked by", request.mask.image_id, is_id=True))
    parts += [
        Part("Size", f"{request.width} × {request.height} pixels"),
        Part("Images", str(request.num_images)),
        Part("Steps", str(request.steps)),
        Part("Sampler", request.sampler or "the base model's own"),
        Part("Guidance", f"{request.guidance_scale:g}{guidance_text(request)}"),
        Part("Seed" if request.num_images == 1 else "Seeds", ", ".join(map(str, request.seeds))),
    ]
    return parts


def guidance_text(request: GenerationRequest) -> str:
    """Say over which part of the steps guidance acts and what that saves; '' where that is all of them, or none."""
    steps, guided = request.own_steps, request.guided_steps
    if request.guidance_scale <= 1 or len(guided) == steps:
        return ""
    return f" over {len(guided)} of {steps} steps: about {round(50 * (1 - len(guided) / steps))} % less work"


def drawn_with(request: Request | None, lora_names: Mapping[str, str]) -> str:
    """Name the LoRAs of a generation, or its base model where it has none."""
    if not isinstance(request, GenerationRequest):
        return ""
    return " + ".join(lora_names.get(lora.id, "LoRA removed") for lora in request.loras) or request.base_model


def timeline(job: Job) -> list[Part]:
    """List how long each part of the last attempt took, and how many attempts there were."""
    parts: list[Part] = []
    if job.started_at is not None:
        parts.append(Part("Waited", measured_duration(job.started_at - job.created_at)))
    if job.timings is not None:
        parts += [
            Part("Loaded the LoRA", measured_duration(timedelta(seconds=job.timings.load))),
            Part("Generated", measured_duration(timedelta(seconds=job.timings.denoise))),
            Part("Stored", measured_duration(timedelta(seconds=job.timings.store))),
        ]
    if job.marks:
        parts.append(Part("Marked by", ", ".join(MARK_NAMES.get(mark, mark) for mark in job.marks)))
    if any(job.unread):
        said = [f"{count} of the {text.replace('_', ' ')}" for text, count in job.unread._asdict().items() if count]
        parts.append(Part("Characters not read", ", ".join(said)))
    if job.finished_at is not None:
        parts.append(Part("Total", measured_duration(job.finished_at - job.created_at)))
    if job.seconds is not None:
        parts.append(Part("Worker time", measured_duration(timedelta(seconds=job.seconds))))
    if job.attempt:
        parts.append(Part("Attempts", str(job.attempt)))
    return parts
