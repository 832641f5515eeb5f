"""Parts of a claim of jobs: its fairness, its nonce, and the rows that the script answers."""

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import FailureCode, UnreadableRecord
from serve_app.domain.jobs import Claim, Failure, JobKind, Lease
from serve_app.stores.records import UNREADABLE, pairs, read_request

DAMAGED = Failure(
    code=FailureCode.GENERATION_FAILED, message="The job's record cannot be read by this version of the service."
)
"""How a job fails whose record is damaged."""
NEWER_RECORD_PAUSE = timedelta(seconds=5)
"""A job that a newer version wrote is offered again after this long, until one of its workers takes it or it has expired."""

MAX_RESIDENT = 1_000
"""Groups that one claim names: where jobs wait, the script parts them at 0.2 µs each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fairness:
    """How far grouping by adapter may deviate from fairness.

    The fair head is skipped at most `max_skips` times, and no later than `max_wait` after the first; no account is preferred
    while more than `max_lead` average waiting jobs ahead; a job is left to the worker that holds its adapter for at most
    `owner_wait` after it was accepted.
    """

    max_skips: int = 4
    max_wait: timedelta = timedelta(seconds=10)
    max_lead: float = 4.0
    owner_wait: timedelta = timedelta(seconds=1)


def new_nonce() -> str:
    """Name a claim; its repeats use the same name."""
    return secrets.token_hex(8)


def named_in_claim(resident: Sequence[str]) -> str:
    """Return the groups that a claim names, one a line: of very many, other ones at each claim."""
    return "\n".join(resident if len(resident) <= MAX_RESIDENT else random.sample(resident, MAX_RESIDENT))


class ClaimedRow(NamedTuple):
    """What `claim.lua` answers for one job."""

    job_id: str
    attempt: int
    fields: Mapping[str, str]

    @property
    def lease(self) -> Lease:
        return Lease(self.job_id, self.attempt)

    def read(self, kind: JobKind) -> Claim:
        """Read a row of the script's answer. Raises `UnreadableRecord`."""
        request = read_request(kind, self.fields)
        try:
            created_at = from_epoch_ms(self.fields["created"])
        except UNREADABLE as error:
            raise UnreadableRecord(f"created: {type(error).__name__}") from error
        return Claim(
            lease=self.lease,
            group=self.fields.get("group", ""),
            account_id=self.fields.get("account", ""),
            request=request,
            created_at=created_at,
            request_id=self.fields.get("request_id", ""),
            traceparent=self.fields.get("traceparent", ""),
        )


def claimed_rows(answer: Sequence[Any]) -> list[ClaimedRow]:
    return [ClaimedRow(job_id, attempt, pairs(fields)) for job_id, attempt, fields in answer]
