"""LoRAs as text for pages: what was found in its file, how large it is, why one was refused."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from serve_app.api.site.job_text import Part
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import (
    AtelierError,
    IdempotencyConflict,
    InvalidParameter,
    LoraQuotaExceeded,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest

_STATUSES = {LoraQuotaExceeded: 409, IdempotencyConflict: 409, PayloadTooLarge: 413, RequestTimeout: 408}
FORM_ERRORS = (InvalidParameter, UnsupportedMediaType, *_STATUSES)
_FIELDS = {
    "file": "The file was refused",
    "adapter_config": "adapter_config.json was refused",
    "base_model": "Base model",
    "name": "Name",
    "description": "Description",
    "trigger_words": "Trigger words",
    "account": "Account",
}


class FormError(NamedTuple):
    """Why a form was refused, as a sentence, and the answer's status."""

    status: int
    text: str


def form_error(error: AtelierError) -> FormError:
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 400)
    return FormError(404 if isinstance(error, NotFound) else status, form_message(error.message))


def form_message(message: str) -> str:
    """A message that begins with a field's name, as a person reads it."""
    field, colon, rest = message.partition(": ")
    text = f"{_FIELDS[field]}: {rest}" if colon and field in _FIELDS else message
    return text if text.endswith(".") else f"{text}."


def found_parts(adapter: Adapter) -> list[Part]:
    """List what is known of a LoRA; of the operator's LoRAs, nothing was found in the file."""
    found, parts = adapter.found, [Part("Id", adapter.id, is_id=True), Part("Base model", adapter.base_model)]
    if adapter.trigger_words:
        parts.append(Part("Trigger words", ", ".join(adapter.trigger_words)))
    if found:
        named = {
            "Algorithm": "algorithm",
            "Rank": "rank",
            "Layers": "layers",
            "Changes": "targets",
            "Parts of the model": "components",
        }
        for label, name in named.items():
            value = found.get(name)
            if value:
                parts.append(Part(label, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
        if found.get("writer"):
            parts.append(Part("Made with", str(found["writer"])))
    if adapter.size_bytes:
        parts.append(Part("Size", size_text(adapter.size_bytes)))
    return [*parts, Part("Added", f"{adapter.created_at:%-d %b %Y}"), Part("SHA-256", adapter.sha256, is_id=True)]


def training_parts(adapter: Adapter) -> list[Part]:
    """List the metadata that the trainer wrote into the file."""
    metadata: Mapping[str, str] = adapter.found.get("metadata", {})
    return [Part(name, text) for name, text in sorted(metadata.items())]


def suggested_words(adapter: Adapter) -> list[str]:
    """Trigger words that the file names and the LoRA has not."""
    return [word for word in adapter.found.get("suggested_trigger_words", ()) if word not in adapter.trigger_words]


def samples_of(jobs: Iterable[Job]) -> Mapping[str, Job]:
    """The newest of these jobs with an image, of each LoRA."""
    found: dict[str, Job] = {}
    for job in jobs:
        if job.images and isinstance(job.request, GenerationRequest):
            found.setdefault(job.request.lora_id, job)
    return found


def size_text(number: int) -> str:
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"
