"""Builds successful responses as JSON: acknowledgements, and polls with an entity tag and `Prefer: wait=N`."""

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from serve_app.api.dependencies import image_signer, jobs_of, loras_of
from serve_app.api.openapi import Schema
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, Job, JobState
from serve_app.jobs.acceptance import Acceptance

POLL_EVERY_S = 5
"""The documents' example clients poll every 5 seconds; `Retry-After` on an acknowledgement says the same."""

_ENDINGS = {
    JobState.CANCELED: Failure(code=FailureCode.CANCELED, message="The request was canceled."),
    JobState.EXPIRED: Failure(code=FailureCode.EXPIRED, message="The request waited too long and expired."),
}
_FAILED = Failure(code=FailureCode.GENERATION_FAILED, message="The images could not be made.")


def json_response(body: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Write the model as JSON without the fields that are None.

    FastAPI passes the response on without validating the body a second time.
    """
    content = body.model_dump_json(exclude_none=True)
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def record_response(record: Mapping[str, Any]) -> Response:
    """Answer with plain values as JSON."""
    return Response(encode(record), media_type="application/json")


def encode(record: Mapping[str, Any], *, is_ascii: bool = False) -> bytes:
    return json.dumps(record, ensure_ascii=is_ascii, separators=(",", ":")).encode()


def created_headers(request: Request, path: str, *, replayed: bool) -> dict[str, str]:
    """Return headers that say where the new thing is, and whether the response repeats an earlier one."""
    headers = {"Location": request.scope.get("root_path", "") + path}
    return headers | {"Idempotency-Replayed": "true"} if replayed else headers


def accepted_headers(request: Request, path: str, *, replayed: bool) -> dict[str, str]:
    """Return `created_headers` of a job, with when to poll."""
    return created_headers(request, path, replayed=replayed) | {"Retry-After": str(POLL_EVERY_S)}


def time_left(job: Job) -> timedelta:
    """Return how long the job is expected to take from now; zero once it has ended.

    It does not depend on this machine's clock.
    """
    if job.finish_estimate is None or job.read_at is None:
        return timedelta()
    return job.finish_estimate - job.read_at


def estimated_completion(job: Job) -> datetime:
    """Return when the job is expected to end, rounded up to the next whole second.

    So it is not in the past when it is read.
    """
    moment = job.finish_estimate or job.read_at
    assert moment is not None, f"{job.id} was read without its queue position"
    return moment.replace(microsecond=0) + timedelta(seconds=1)


def failure_of(job: Job) -> Failure:
    """Return why a job ended without images."""
    return job.failure or _ENDINGS.get(job.state, _FAILED)


LONGEST_WAIT_S = 30
"""The longest wait is below the time limits that proxies and clients usually have."""
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*(?=$|[,;])", re.IGNORECASE)
_TAG_BYTES = 16

NOT_MODIFIED: Schema = {
    "description": "The record has not changed since the response whose `ETag` was sent in `If-None-Match`."
}


def wait_parameter(what: str) -> Schema:
    """Document the header by which a caller waits for a job's end, and is answered with `what` in any case."""
    text = (
        f"`wait=N` (RFC 7240): answer when the job has ended, or after N seconds (at most {LONGEST_WAIT_S}) with the "
        f"{what} as it is then. `Preference-Applied` confirms it."
    )
    return {"name": "Prefer", "in": "header", "description": text, "schema": {"type": "string"}}


POLL_PARAMETERS: Schema = {
    "parameters": [
        wait_parameter("record"),
        {
            "name": "If-None-Match",
            "in": "header",
            "description": "The `ETag` of an earlier response: an unchanged record is answered with 304 and no body.",
            "schema": {"type": "string"},
        },
    ]
}
"""`openapi_extra=` of a polling operation documents what is read without FastAPI, which would cost a poll 20 µs."""

Record = Mapping[str, Any]


async def answer_poll(
    request: Request, load: Callable[[], Awaitable[Job]], record_of: Callable[[Job, Callable[[str], str]], Record]
) -> Response:
    """Answer with the record that `load` reads, once it has ended or the preferred wait is over."""
    job, applied = await after_wait(request, load)
    content = encode(record_of(job, image_signer(request)))
    tag = f'"{hashlib.blake2b(content, digest_size=_TAG_BYTES).hexdigest()}"'
    again = {} if job.state.is_terminal else {"Retry-After": str(POLL_EVERY_S)}
    headers = {"ETag": tag, **again, **applied, **unread_header(job)}
    if _matches(_joined(request, "if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="application/json")


def unread_header(job: Job) -> dict[str, str]:
    """Return the header that says how much of a job's texts its base model did not read, if anything."""
    told = [f"{text}={characters}" for text, characters in job.unread._asdict().items() if characters]
    return {"X-Unread-Characters": ", ".join(told)} if told else {}


async def after_wait(request: Request, load: Callable[[], Awaitable[Job]]) -> tuple[Job, Mapping[str, str]]:
    """Return the job as `load` reads it once it has ended or the preferred wait is over, and the header that says so.

    Without a preference, or a place to wait in, it is read once, and there is no header. The job does not depend on the
    caller, who may go meanwhile.
    """
    job = await load()
    seconds = preferred_wait(_joined(request, "prefer")) if not job.state.is_terminal else 0
    if not (seconds and await jobs_of(request).waits.until_ended(job.id, account_id=job.account_id, seconds=seconds)):
        return job, {}
    return await load(), {"Preference-Applied": f"wait={seconds}"}


def _joined(request: Request, name: str) -> str:
    """Return a header's lines as one list; '' without it."""
    return ", ".join(request.headers.getlist(name))


def preferred_wait(prefer: str) -> int:
    """Return the seconds of `wait=N` in a `Prefer` header, at most `LONGEST_WAIT_S`.

    0 without one: an unknown preference is ignored.
    """
    found = _WAIT.search(prefer) if prefer else None
    return min(LONGEST_WAIT_S, int(found[1])) if found else 0


def _matches(if_none_match: str, tag: str) -> bool:
    return bool(if_none_match) and any(
        each.strip().removeprefix("W/") in (tag, "*") for each in if_none_match.split(",")
    )


NAME = "X-Unknown-Words"
MOST_WORDS, LONGEST = 20, 500
"""The header's value has at most this many words and characters."""


async def unknown_words_header(request: Request, acceptance: Acceptance, prompt: str) -> dict[str, str]:
    """Return the header with the unknown words of an accepted generation's prompt, if it has any."""
    vocabulary = loras_of(request).vocabulary
    words = await vocabulary.unknown_words(prompt, acceptance.base_model, acceptance.trigger_words)
    value = header_value(words)
    return {NAME: value} if value else {}


def header_value(words: Iterable[str]) -> str:
    """Join words by commas, percent-encoded beyond ASCII; only the first where they are too many."""
    value = ""
    for word in list(words)[:MOST_WORDS]:
        longer = f"{value}, {quote(word)}" if value else quote(word)
        if len(longer) > LONGEST:
            break
        value = longer
    return value
