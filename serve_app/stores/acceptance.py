"""Acceptance: what `accept.lua` answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.domain.errors import Forbidden, IdempotencyConflict, QueueFull
from serve_app.domain.jobs import Job
from serve_app.settings import Settings
from serve_app.stores.records import read_snapshot


@dataclass(frozen=True, slots=True)
class Acceptance:
    """An accepted job; `replayed` when an earlier call with the same idempotency key made it."""

    job: Job
    replayed: bool


def read_acceptance(answer: Sequence[Any], settings: Settings) -> Acceptance:
    """Raises `Forbidden`, `QueueFull`, `IdempotencyConflict`."""
    status, snapshot = answer
    if status == "forbidden":
        raise Forbidden("you may not use this LoRA")
    if status == "full":
        raise QueueFull("the queue is full; try again later")
    if status == "account_full":
        raise QueueFull(f"at most {settings.max_queued_per_account} unfinished jobs per account")
    if status == "conflict":
        raise IdempotencyConflict("this Idempotency-Key was used with a different body")
    job = read_snapshot(snapshot)
    assert job is not None, "accept answers with the record it wrote"
    return Acceptance(job, replayed=status == "replay")
