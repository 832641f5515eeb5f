"""Reads the answers of `accept.lua`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.domain.errors import Forbidden, IdempotencyConflict, NotFound, QueueFull
from serve_app.domain.jobs import Job
from serve_app.jobs.records import read_snapshot
from serve_app.settings import Settings

STORED_RETRY_S = 3_600
"""A caller whose stored jobs are too many is asked to wait this long: jobs expire over days, or are deleted."""


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
