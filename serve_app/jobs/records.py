"""Job records in Redis: text, request and result packed (`compact_form.py`), never pickle.

Two versions of the code may run at once. A record carries the version of its format; a reader ignores fields that it
does not know, and raises `UnreadableRecord` for what it cannot read.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serve_app.domain.durations import MILLI, from_epoch_ms
from serve_app.domain.errors import FailureCode, UnreadableRecord
from serve_app.domain.jobs import Failure, Job, JobKind, JobState, Unread, kind_of_pool
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant
from serve_app.jobs.backlog import QueuePosition, estimate_finish, read_position, waits_for_worker
from serve_app.jobs.compact_form import Result, unpack_request, unpack_result
from serve_app.store.script import pairs

log = logging.getLogger(__name__)

RECORD_VERSION = 3
"""This code writes records of this version. Raise it with a change that a reader of the version before would misread;
an added field needs no new version. A record that an ended job leaves has none: nobody works on it."""
JOB_BYTES = 1_100
"""A job takes this many bytes besides its packed request, with indexes and one image (`benchmarks/job_memory.py`)."""
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, OSError)
"""Reading a damaged field raises one of these; `datetime` raises the last two for a time out of range."""


def work_of(request: Request) -> int:
    """A request's work in thousandths of a unit, at least one."""
    return max(1, round(request.work * MILLI))


def read_request(kind: JobKind, fields: Mapping[str, str]) -> Request:
    """Read a request. Raises `UnreadableRecord`, which names the field and nothing of the request."""
    try:
        return _REQUESTS[kind].validate_json(unpack_request(fields), strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in ("request", *first["loc"]))
    raise UnreadableRecord(f"{place}: {first['type']}")  # not within `except`: that error holds the prompt


def read_state(text: str) -> JobState:
    """Read a state. Raises `UnreadableRecord` for one of a newer version."""
    try:
        return JobState(text)
    except ValueError as error:
        raise UnreadableRecord from error


def record_version(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def read_snapshot(answer: Sequence[Any], *, with_request: bool = True) -> Job | None:
    """Read a job from a script's snapshot, with its estimate if it has not ended. Raises `UnreadableRecord`."""
    if not answer:
        return None
    job_id, fields, position = answer
    return read_job(job_id, pairs(fields), read_position(position), with_request=with_request)


def read_job(
    job_id: str, fields: Mapping[str, str], position: QueuePosition | None = None, *, with_request: bool = True
) -> Job:
    """Read a job, without its request if that is unreadable.

    Raises `UnreadableRecord` when its state, times or result cannot be read.
    """
    try:
        return _read_job(job_id, fields, position, with_request)
    except (UnreadableRecord, *UNREADABLE) as error:
        log.warning("job %s: its record (version %s) cannot be read: %s", job_id, fields.get("version", "-"), error)
        raise UnreadableRecord from error


def _read_job(job_id: str, fields: Mapping[str, str], position: QueuePosition | None, with_request: bool) -> Job:
    state, kind, created = read_state(fields["state"]), kind_in(job_id, fields), int(fields["created"])
    is_completed = state is JobState.COMPLETED
    result = unpack_result(job_id, fields) if is_completed else Result()
    return Job(
        id=job_id,
        kind=kind,
        variant=Variant(fields["variant"]),
        account_id=fields["account"],
        request=_request_if_readable(job_id, kind, fields) if with_request else None,
        state=state,
        progress=100 if is_completed else int(fields.get("progress", 0)),
        attempt=int(fields.get("attempt", 0)),
        created_at=from_epoch_ms(created),
        started_at=from_epoch_ms(created + int(fields["started"])) if "started" in fields else None,
        finished_at=from_epoch_ms(created + int(fields["finished"])) if state.is_terminal else None,
        read_at=None if position is None else position.now,
        finish_estimate=None
        if state.is_terminal or position is None
        else estimate_finish(kind, state, fields, position),
        jobs_ahead=position.place if position and state is JobState.QUEUED and position.place >= 0 else None,
        pool=fields.get("kind", ""),
        waits_for_worker=position is not None and waits_for_worker(state, position),
        images=result.images,
        failure=_failure(state, fields),
        key_id=fields.get("key", ""),
        seconds=result.seconds,
        timings=result.timings,
        marks=tuple(fields.get("marks", "").split()),
        unread=Unread(*map(int, fields.get("unread", "").split())),
    )


def kind_in(job_id: str, fields: Mapping[str, str]) -> JobKind:
    """Return a job's kind, which only its id tells once it has ended."""
    return kind_of_pool(fields.get("kind") or (JobKind.UPSCALE if job_id.startswith("up_") else JobKind.GENERATION))


_REQUESTS: Mapping[JobKind, TypeAdapter[Any]] = {
    JobKind.GENERATION: TypeAdapter(GenerationRequest),
    JobKind.UPSCALE: TypeAdapter(UpscaleRequest),
}


def _request_if_readable(job_id: str, kind: JobKind, fields: Mapping[str, str]) -> Request | None:
    try:
        return read_request(kind, fields)
    except UnreadableRecord as error:
        log.warning("job %s: its request (version %s) cannot be read: %s", job_id, fields.get("version", "-"), error)
        return None


_ENDED = {
    JobState.CANCELED: Failure(code=FailureCode.CANCELED, message="canceled on request"),
    JobState.EXPIRED: Failure(code=FailureCode.EXPIRED, message="the job waited longer than the limit"),
}


def _failure(state: JobState, fields: Mapping[str, str]) -> Failure | None:
    if "code" in fields:
        return Failure(code=_failure_code(fields["code"]), message=fields["message"])
    return _ENDED.get(state)


def _failure_code(text: str) -> FailureCode:
    """Read a code; one of a newer version becomes `GENERATION_FAILED`."""
    try:
        return FailureCode(text)
    except ValueError:
        return FailureCode.GENERATION_FAILED
