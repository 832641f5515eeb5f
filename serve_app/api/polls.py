"""Answers polls, with an entity tag for unchanged jobs and later under `Prefer: wait=N`; writes `X-Unknown-Words`."""

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from fastapi import Request
from starlette.responses import Response

from serve_app.api.dependencies import image_signer, jobs_of, loras_of
from serve_app.api.openapi import Schema
from serve_app.api.responses import encode, poll_headers
from serve_app.domain.jobs import Job
from serve_app.jobs.acceptance import Acceptance

LONGEST_WAIT_S = 30
"""The longest wait is below the time limits that proxies and clients usually have."""
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*(?=$|[,;])", re.IGNORECASE)
_TAG_BYTES = 16

NOT_MODIFIED: Schema = {
    "description": "The record has not changed since the response whose `ETag` was sent in `If-None-Match`."
}
POLL_PARAMETERS: Schema = {
    "parameters": [
        {
            "name": "Prefer",
            "in": "header",
            "description": (
                f"`wait=N` (RFC 7240): answer when the job has ended, or after N seconds (at most {LONGEST_WAIT_S}) "
                "with the record as it is then. `Preference-Applied` confirms it."
            ),
            "schema": {"type": "string"},
        },
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
    job, applied = await after_wait(request, await load(), load)
    content = encode(record_of(job, image_signer(request)))
    tag = f'"{hashlib.blake2b(content, digest_size=_TAG_BYTES).hexdigest()}"'
    headers = {"ETag": tag, **poll_headers(job), **applied}
    if _matches(_joined(request, "if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="application/json")


async def after_wait(request: Request, job: Job, load: Callable[[], Awaitable[Job]]) -> tuple[Job, Mapping[str, str]]:
    """Return the job as `load` reads it once it has ended or the preferred wait is over, and the header that says so.

    Without a preference, or a place to wait in, they are the same job and no header. The job does not depend on the
    caller, who may go meanwhile.
    """
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
