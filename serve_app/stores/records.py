"""Job records in Redis: text fields, JSON for the request and the images, never pickle.

Two versions of the code may run at once. A record carries the version of its format; a reader ignores fields that it does
not know, and raises `UnreadableRecord` for what it cannot read.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import FailureCode, UnreadableRecord
from serve_app.domain.jobs import Failure, Job, JobKind, JobState, StoredImage, Timings
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant
from serve_app.stores.compact_form import unpack
from serve_app.stores.estimates import MILLI, QueuePosition, estimate_finish, read_position, waits_for_worker

log = logging.getLogger(__name__)

RECORD_VERSION = 1
"""Of the records that this code writes; 0 are those from before records carried one. Raise it with a change that a reader of
the version before would misread; a field more needs no new version."""
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, OSError)
"""What reading a damaged field raises; the last two are `datetime`'s for a time out of range."""


def work_of(request: Request) -> int:
    """A request's work in thousandths of a unit, at least one."""
    return max(1, round(request.work * MILLI))


def write_request(request: Request) -> str:
    return json.dumps(asdict(request), separators=(",", ":"))


def read_request(kind: JobKind, text: str | None) -> Request:
    """Read a request. Raises `UnreadableRecord`, which names the field and nothing of the request."""
    return _parse(_REQUESTS[kind], text, "request")


def read_state(text: str) -> JobState:
    """Read a state. Raises `UnreadableRecord` for one of a newer version."""
    try:
        return JobState(text)
    except ValueError as error:
        raise UnreadableRecord from error


def record_version(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def write_images(images: Sequence[StoredImage]) -> str:
    return json.dumps([asdict(image) for image in images], separators=(",", ":"))


def read_images(text: str | None) -> tuple[StoredImage, ...]:
    """Read the images. Raises `UnreadableRecord`."""
    return _parse(_IMAGES, text, "images")


def write_timings(timings: Timings | None) -> str:
    return "" if timings is None else json.dumps(asdict(timings), separators=(",", ":"))


def read_snapshot(answer: Sequence[Any]) -> Job | None:
    """Read a job from a script's snapshot, with its estimate if it has not ended.

    Raises `UnreadableRecord`.
    """
    if not answer:
        return None
    job_id, fields, position = answer
    return read_job(job_id, pairs(fields), read_position(position))


def read_jobs(rows: Mapping[str, Mapping[str, str]]) -> list[Job]:
    """Read the jobs that this version can; the others are logged and left out."""
    jobs: list[Job] = []
    for job_id, fields in rows.items():
        try:
            jobs.append(read_job(job_id, fields))
        except UnreadableRecord:
            continue
    return jobs


def read_job(job_id: str, fields: Mapping[str, str], position: QueuePosition | None = None) -> Job:
    """Read a job, without its request if that is unreadable.

    Raises `UnreadableRecord` when its kind, state, times or images cannot be read.
    """
    try:
        return _read_job(job_id, fields, position)
    except (UnreadableRecord, *UNREADABLE) as error:
        log.warning("job %s: its record (version %s) cannot be read: %s", job_id, fields.get("version", 0), error)
        raise UnreadableRecord from error


def _read_job(job_id: str, fields: Mapping[str, str], position: QueuePosition | None) -> Job:
    fields = unpack(job_id, fields)
    state, kind = read_state(fields["state"]), JobKind(fields["kind"])
    return Job(
        id=job_id,
        kind=kind,
        variant=Variant(fields["variant"]),
        account_id=fields["account"],
        request=_request_if_readable(job_id, kind, fields),
        state=state,
        progress=int(fields.get("progress", 0)),
        attempt=int(fields.get("attempt", 0)),
        created_at=from_epoch_ms(fields["created"]),
        started_at=from_epoch_ms(fields["started"]) if "started" in fields else None,
        finished_at=from_epoch_ms(fields["finished"]) if state.is_terminal else None,
        read_at=None if position is None else position.now,
        finish_estimate=None
        if state.is_terminal or position is None
        else estimate_finish(kind, state, fields, position),
        jobs_ahead=position.place if position and state is JobState.QUEUED and position.place >= 0 else None,
        waits_for_worker=position is not None and waits_for_worker(state, position),
        images=read_images(fields.get("images")) if state is JobState.COMPLETED else (),
        failure=Failure(code=_failure_code(fields["code"]), message=fields["message"]) if "code" in fields else None,
        key_id=fields.get("key", ""),
        seconds=float(fields["seconds"]) if "seconds" in fields else None,
        timings=_timings_if_readable(fields.get("timings")),
    )


_Parsed = TypeVar("_Parsed")
_REQUESTS: Mapping[JobKind, TypeAdapter[Any]] = {
    JobKind.GENERATION: TypeAdapter(GenerationRequest),
    JobKind.UPSCALE: TypeAdapter(UpscaleRequest),
}
_IMAGES = TypeAdapter(tuple[StoredImage, ...])
_TIMINGS = TypeAdapter(Timings)


def _parse(adapter: TypeAdapter[_Parsed], text: str | None, name: str) -> _Parsed:
    try:
        return adapter.validate_json(text or "", strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in (name, *first["loc"]))
    raise UnreadableRecord(f"{place}: {first['type']}")  # outside the handler: the library's error holds the prompt


def _request_if_readable(job_id: str, kind: JobKind, fields: Mapping[str, str]) -> Request | None:
    try:
        return read_request(kind, fields.get("request"))
    except UnreadableRecord as error:
        log.warning("job %s: its request (version %s) cannot be read: %s", job_id, fields.get("version", 0), error)
        return None


def _timings_if_readable(text: str | None) -> Timings | None:
    """Read the timings of a completed attempt, which only pages show."""
    try:
        return _parse(_TIMINGS, text, "timings") if text else None
    except UnreadableRecord:
        return None


def _failure_code(text: str) -> FailureCode:
    """Read a code; one of a newer version becomes `GENERATION_FAILED`."""
    try:
        return FailureCode(text)
    except ValueError:
        return FailureCode.GENERATION_FAILED


def pairs(flat: Sequence[str]) -> Mapping[str, str]:
    """Read a hash from a script's answer: names and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
