"""What `accept.lua` is told of a job, with its price, and what it answers.

Fairness, estimates and scaling count what a worker does for a job, texts included. The unit of a price is a
megapixel-step with guidance, which takes two rows of a forward pass; one row is half of it. Who accepts a job has no
tokenizer, and a token is at least one byte of UTF-8, so that texts are priced by their bytes: digits and rare letters
cost what they take, and English, of which a token is about four, costs less than its price. docs/contribute/decisions/scaling.md
has the measurements.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.domain.digests import Digests
from serve_app.domain.durations import MILLI
from serve_app.domain.errors import Forbidden, IdempotencyConflict, NotFound, QueueFull
from serve_app.domain.families import BY_PIPELINE, UNKNOWN, Abilities
from serve_app.domain.jobs import Job, NewJob, kind_of
from serve_app.domain.prompt_weights import MOST_LOWERED
from serve_app.domain.requests import GenerationRequest, Priority, Request, Variant
from serve_app.jobs.compact_form import as_text, pack_request
from serve_app.jobs.records import read_snapshot, work_of
from serve_app.settings import Settings
from serve_app.store.script import Argument

STORED_RETRY_S = 3_600
"""A caller whose stored jobs are too many is asked to wait this long: jobs expire over days, or are deleted."""
ENCODED_BYTE = 0.0003
"""Encoding a byte of a prompt once costs this many units, with every family."""
CHUNK = 75
"""Tokens of a chunk, which CLIP encodes once more for each part of it that weighs less than 1."""


def key_args(account_id: str, variant: Variant, key: str | None, body: Digests) -> dict[str, Argument]:
    """Return how the scripts are told whose idempotency key a call has, and with what it must come again."""
    return {
        "account": account_id,
        "variant": variant,
        "idempotency_digest": "" if key is None else _digest(key),
        "given_digest": body.given,
        "body_digest": body.before,
    }


def accept_row(new: NewJob) -> bytes:
    """Return a job as `write_job` in `accept.lua` takes it, without what it does not have.

    It is JSON in which packed bytes stand as they are.
    """
    row: Mapping[str, Any] = {
        "id": new.job_id,
        "pool": kind_of(new.request),
        "weights": new.weights,
        "work": work_of(new.request),
        "prices": prices(new.request) if isinstance(new.request, GenerationRequest) else None,
        "queue_share": new.queue_share,
        "num_images": new.request.num_images,
        "request": as_text(pack_request(new.request, new.loras[0].id if new.loras else "")),
        "rate_token": new.rate_token,
        "loras": [(lora.id, repr(float(lora.weight))) for lora in new.loras],
        "base": new.request.base_model if isinstance(new.request, GenerationRequest) else "",
        "cost": new.cost,
        "guided": _is_left_to_catalog(new.request) or None,
        "low_priority": new.request.priority is Priority.LOW or None,
        "start_within_ms": None if new.request.start_within is None else new.request.start_within * MILLI,
        "sample": new.is_sample or None,
        "traceparent": new.traceparent,
        "webhook": new.webhook,
        "pictures": new.pictures or None,
    }
    given = {name: value for name, value in row.items() if value is not None and value != ""}
    return json.dumps(given, ensure_ascii=False).encode(errors="surrogateescape")


def _is_left_to_catalog(request: Request) -> bool:
    """Return whether the catalog may say which part of the steps has guidance, by which the price is less."""
    return isinstance(request, GenerationRequest) and request.guidance_scale > 1 and request.guidance_start is None


def prices(request: GenerationRequest) -> Mapping[str, tuple[int, int]]:
    """Return what a generation costs in thousandths of a unit, by the pipeline class of its base model.

    '' stands for any other class. The first number counts for each pass of a step, the second once.
    """
    return {name: _price(request, abilities) for name, abilities in {**BY_PIPELINE, "": UNKNOWN}.items()}


def _price(request: GenerationRequest, abilities: Abilities) -> tuple[int, int]:
    prompts = [request.prompt, request.negative_prompt] if request.guidance_scale > 1 else [request.prompt]
    lengths = [abilities.text_bytes(prompt) for prompt in prompts]
    per_step = request.width * request.height / 1e6 + max(lengths) * abilities.megapixels_per_byte
    rows = request.num_images * (request.own_steps + len(request.guided_steps))
    denoising = rows * per_step / 2
    encoded = sum(lengths)
    if request.prompt_weights:
        encoded += sum(map(_bytes_read_again, prompts))
    return max(1, round(denoising * MILLI)), round(encoded * ENCODED_BYTE * MILLI)


def _bytes_read_again(prompt: str) -> int:
    """Return the most bytes that may be encoded again with some of them hidden, by the number of brackets."""
    brackets = prompt.count("(") + prompt.count("[")
    return brackets and len(prompt.encode()) + min(brackets, MOST_LOWERED) * CHUNK


@dataclass(frozen=True, slots=True)
class Acceptance:
    """An accepted job, read without its request; `replayed` when an earlier call with the same idempotency key made it.

    `base_model` is what it is drawn by, and `trigger_words` are of the LoRAs that it uses.
    """

    job: Job
    replayed: bool
    base_model: str = ""
    trigger_words: tuple[str, ...] = ()


def read_acceptance(answer: Sequence[Any], settings: Settings) -> Acceptance:
    """Read the job that a script accepted. Raises `Forbidden`, `QueueFull`, `IdempotencyConflict`, `NotFound`."""
    status, snapshot, lora = answer
    _refuse(status, settings)
    if status == "conflict":
        raise IdempotencyConflict("This Idempotency-Key was used with a different body.")
    base_model, *words = lora
    job = read_snapshot(snapshot, with_request=False)
    assert job is not None, "accept answers with the record it wrote"
    return Acceptance(
        job,
        replayed=status == "replay",
        base_model=base_model,
        trigger_words=tuple(word for each in words for word in json.loads(each)),
    )


def _refuse(status: str, settings: Settings) -> None:
    if status == "forbidden":
        raise Forbidden("You may not use this LoRA.")
    if status == "no_image":
        raise NotFound("There is no such image.")
    if status == "full":
        raise QueueFull("the queue is full; try again later")
    if status == "account_full":
        raise QueueFull(f"at most {settings.max_queued_per_account} unfinished jobs per account")
    if status == "account_stored":
        message = (
            "the account's stored jobs take its share of the service's memory; delete jobs, or wait until some expire"
        )
        raise QueueFull(message, retry_after_s=STORED_RETRY_S)


def _digest(text: str) -> str:
    """Return 128 bits of a text's digest, which each job with an idempotency key keeps."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
