"""`GET /v1/jobs/{job_id}/events`: what becomes of a job, as a stream of server-sent events that can be resumed.

An event's id says all that its reader has seen by then, so that any ingress goes on from there with what Redis has.
"""

import asyncio
import hmac
import logging
import re
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve_app.accounts.api_keys import KeyDigest, digests_of
from serve_app.api.credentials import Credential
from serve_app.api.dependencies import (
    base_url,
    credential_of,
    found,
    image_signer,
    jobs_of,
    load_job,
    settings_of,
    still_reads,
)
from serve_app.api.errors import POLL_ERRORS, domain_error_response, error_responses
from serve_app.api.jobs.records import job_record
from serve_app.api.jobs.routes import JobId
from serve_app.api.openapi import success
from serve_app.api.request_context import RequestContext
from serve_app.api.responses import encode, json_response
from serve_app.api.routing import ClosedRoute
from serve_app.api.schemas import ResponseBody, Url, UtcTime
from serve_app.domain.errors import AtelierError, Overloaded, Unauthorized
from serve_app.domain.jobs import JOB_PREFIXES, Job
from serve_app.domain.requests import Variant
from serve_app.jobs.waits import JobLook, Watch

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""How long a stream may be silent, far below the time limits of proxies."""
CHECK_EVERY_S = 4.0
"""Each stream asks again after this time whether its key may still read."""
SEND_LIMIT_S = 30.0
"""A reader that takes nothing for this long loses its place."""
RECONNECT_MS = 1_000
"""How long after the end of a stream a browser reconnects."""
END = "end"
"""The id of the last event, after which there is nothing to resume."""
_SEEN = re.compile(r"(queued|running)\.([0-9]{1,9})\.([0-9]{1,3})((?:\.[0-9]{1,3}-[0-9]{1,9}){0,64})")
_STEP = re.compile(r"\.([0-9]+)-([0-9]+)")

_EXAMPLE = """\
event: snapshot
id: queued.0.0
data: {"id":"gen_c4zq2e7wvbbxm5l3r6yhtajd2i","kind":"generation","status":"queued","progress":0}

event: progress
id: running.1.43
data: {"status":"running","attempt":1,"progress":43}

event: preview
id: running.1.43.0-13
data: {"index":0,"step":13,"image":"iVBORw0KGgo="}

event: end
id: end
data: {"id":"gen_c4zq2e7wvbbxm5l3r6yhtajd2i","kind":"generation","status":"completed","progress":100}

"""
_URL = "https://images.example/v1/jobs/gen_c4zq2e7wvbbxm5l3r6yhtajd2i/events?token=1795867800.a.…"
_DESCRIPTION = f"""\
Server-sent events: the data of each is one line of JSON. A browser's `EventSource` sends no API key; it opens an \
address of `getEventsAddress`.

- `snapshot`: the job, as `getJob` answers, at once.
- `progress`: `status`, `attempt` and `progress` (percent), whenever one of them changes.
- `preview`: a small PNG (`image`, base64) of the unfinished image `index` after `step` steps, from the third step on;
  none where the operator has switched previews off, or moderates images.
- `end`: the job, once it has ended. Nothing follows.

The stream may break off before `end`, as when the service is updated: connect again with the last event's `id` in
`Last-Event-ID`, and only what is new is sent. After `end` that is nothing: 204. A comment comes every \
{HEARTBEAT_S:g} seconds. A key that may no longer read ends the stream. Listening does not count against your plan; \
beyond the places for callers that wait, the answer is 503."""


def _event_schema(name: str, description: str, data: dict[str, Any]) -> dict[str, Any]:
    return _object({"event": {"const": name}, "id": {"type": "string"}, "data": data}) | {"description": description}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [*fields], "properties": fields, "additionalProperties": False}


_JOB = {"$ref": "#/components/schemas/Job"}
_PROGRESS = {"status": {"enum": ["queued", "running"]}, "attempt": {"type": "integer"}, "progress": {"type": "integer"}}
_PREVIEW = {
    "index": {"type": "integer", "description": "Of the image."},
    "step": {"type": "integer"},
    "image": {"type": "string", "contentMediaType": "image/png", "contentEncoding": "base64"},
}
_EVENTS = {
    "JobSnapshotEvent": _event_schema("snapshot", "The job, at once.", _JOB),
    "JobProgressEvent": _event_schema("progress", "What has changed.", _object(_PROGRESS)),
    "JobPreviewEvent": _event_schema("preview", "An unfinished image.", _object(_PREVIEW)),
    "JobEndEvent": _event_schema("end", "The job, once it has ended.", _JOB),
}
SCHEMAS = {
    **_EVENTS,
    "JobEvent": {
        "description": "An event of a job, its data read as JSON.",
        "oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in _EVENTS],
    },
}
"""Each event of a stream, for programs: OpenAPI 3.1 has no schema for a sequence of them."""


@dataclass(slots=True)
class Seen:
    """What a reader has seen of a job: its state, attempt, percentage, and the step of each image's preview."""

    state: str
    attempt: int
    progress: int
    steps: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def read(cls, event_id: str) -> "Seen | None":
        """Read an event's id; None for any other text."""
        match = _SEEN.fullmatch(event_id)
        if match is None:
            return None
        steps = {int(index): int(step) for index, step in _STEP.findall(match[4])}
        return cls(match[1], int(match[2]), int(match[3]), steps)

    @property
    def id(self) -> str:
        steps = "".join(f".{index}-{step}" for index, step in sorted(self.steps.items()))
        return f"{self.state}.{self.attempt}.{self.progress}{steps}"

    def events(self, look: JobLook) -> Iterator[bytes]:
        """Yield an event for each thing that is new in what was found of an unfinished job, as seen from then on."""
        if (look.state, look.attempt, look.progress) != (self.state, self.attempt, self.progress):
            self.state, self.attempt, self.progress = look[:3]
            yield event("progress", self.id, {"status": self.state, "attempt": self.attempt, "progress": self.progress})
        for index, (step, png) in sorted(look.previews.items()):
            if self.steps.get(index) != step:
                self.steps[index] = step
                yield event("preview", self.id, {"index": index, "step": step, "image": b64encode(png).decode()})


def event(name: str, event_id: str, data: Mapping[str, Any]) -> bytes:
    """Write an event, its data in ASCII: httpx, among others, ends a line at U+0085 and U+2028 too."""
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name.encode(), event_id.encode(), encode(data, is_ascii=True))


class EventStream(Response):
    """Sends a job's events until it has ended, the key no longer reads, the reader goes or the process drains."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, job: Job, seen: Seen | None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._job, self._seen = request, job, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        with jobs_of(self._request).waits.watch(job.id, account_id=job.account_id) as watch:
            if watch is None:
                error = Overloaded("too many callers wait for jobs")
                await domain_error_response(error, RequestContext.of(scope))(scope, receive, send)
                return
            gone = asyncio.create_task(_until_gone(receive, watch), name="reader of events")
            try:
                await _send_in_time(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send, watch)
                await _send_in_time(send, {"type": "http.response.body"})
            except TimeoutError:
                log.info("events of %s: their reader has taken nothing for %g s", job.id, SEND_LIMIT_S)
            finally:
                gone.cancel()

    async def _send_events(self, send: Send, watch: Watch) -> None:
        async def send_now(content: bytes) -> None:
            nonlocal sent_at
            await _send_in_time(send, {"type": "http.response.body", "body": content, "more_body": True})
            sent_at = time.monotonic()

        job, sent_at, checked_at = self._job, 0.0, time.monotonic()
        seen = self._seen or Seen(job.state, job.attempt, job.progress)
        snapshot = event("snapshot", seen.id, self._record(job)) if self._seen is None else b""
        await send_now(b"retry: %d\n%b" % (RECONNECT_MS, snapshot))  # a line of the first event, whatever it is
        while not (job.state.is_terminal or watch.is_over):
            look = await watch.next(min(CHECK_EVERY_S, HEARTBEAT_S))
            if look is not None and look.has_ended:
                ended = await self._read()
                if ended is None:
                    return
                job = ended
                continue
            for content in seen.events(look) if look is not None else ():
                await send_now(content)
            now = time.monotonic()
            if now - sent_at > HEARTBEAT_S - CHECK_EVERY_S:
                await send_now(b":\n")  # and no empty line, which some readers take for the end of an event
            if now - checked_at >= CHECK_EVERY_S:
                checked_at = now
                if not await still_reads(self._request):
                    return
        if job.state.is_terminal:
            await send_now(event("end", END, self._record(job)))

    async def _read(self) -> Job | None:
        """Return the ended job; None where it is gone, runs again, or cannot be read now: its reader comes again."""
        if not await still_reads(self._request):
            return None
        with suppress(AtelierError):
            job = await jobs_of(self._request).reader.get(self._job.id, account_id=self._job.account_id)
            return job if job is not None and job.state.is_terminal else None
        return None

    def _record(self, job: Job) -> Mapping[str, Any]:
        return job_record(job, image_signer(self._request))


async def _until_gone(receive: Receive, watch: Watch) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watch.end()


async def _send_in_time(send: Send, message: Message) -> None:
    async with asyncio.timeout(SEND_LIMIT_S):
        await send(message)


TOKEN_LIFE = timedelta(minutes=10)
"""How long a stream can be opened, or opened again, with a token."""


class EventsAddress(ResponseBody):
    """Where whoever has no key, such as a browser's `EventSource`, may follow one job for a while."""

    url: Url
    expires_at: Annotated[UtcTime, Field(description="A stream that is open by then goes on.")]


def _signed(request: Request, job_id: str, said: str) -> str:
    signed = f"events of {job_id}: {said}".encode()
    return f"{said}.{hmac.digest(settings_of(request).pepper_bytes, signed, 'sha256').hex()}"


def _read_token(request: Request, job_id: str, token: str) -> Credential:
    """Return whose key made a token for this job. Raises `Unauthorized`."""
    said, whole = token.rpartition(".")[0], token.encode()
    if not hmac.compare_digest(_signed(request, job_id, said).encode(), whole) or int(said.split(".")[0]) < time.time():
        raise Unauthorized("The token of this address is not valid any more: ask for another.")
    _, variant, *keys = said.split(".")
    return Credential([KeyDigest(*each) for each in zip(keys[::2], keys[1::2], strict=True)], Variant(variant))


router = APIRouter(route_class=ClosedRoute, tags=["Jobs"])


@router.get(
    "/v1/jobs/{job_id}/events/address",
    operation_id="getEventsAddress",
    summary="Make an address by which a browser follows this job for 10 minutes, as long as the key may read",
    response_model=EventsAddress,
    responses={
        200: success("The address.", {"Address": {"url": _URL, "expires_at": "2026-11-28T12:10:00Z"}}),
        **error_responses(*POLL_ERRORS),
    },
)
async def get_events_address(request: Request, job_id: JobId) -> Response:
    job, (secret, variant) = found(await load_job(request, job_id, *JOB_PREFIXES), "job"), credential_of(request)
    expires_at, keys = datetime.now(UTC) + TOKEN_LIFE, digests_of(secret, settings_of(request))
    said = ".".join((f"{expires_at.timestamp():.0f}", variant, *(f"{each.id}.{each.digest}" for each in keys)))
    url = f"{base_url(request)}/v1/jobs/{job.id}/events?token={_signed(request, job.id, said)}"
    return json_response(EventsAddress(url=url, expires_at=expires_at))


@router.get(
    "/v1/jobs/{job_id}/events",
    operation_id="followJob",
    summary="Follow a job: its progress, previews and end as server-sent events",
    description=_DESCRIPTION,
    status_code=200,
    response_class=Response,
    responses={
        200: {
            "description": "The events, until the job has ended.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string", "contentSchema": {"$ref": "#/components/schemas/JobEvent"}},
                    "example": _EXAMPLE,
                }
            },
        },
        204: {"description": "`Last-Event-ID` is that of `end`: there is nothing more."},
        **error_responses(*POLL_ERRORS),
    },
)
async def follow_job(
    request: Request,
    job_id: JobId,
    last_event_id: Annotated[
        str, Header(alias="Last-Event-ID", description="The `id` of the last event that was received.")
    ] = "",
    token: Annotated[
        str, Query(max_length=999, description="In place of a key: that of an address of `getEventsAddress`.")
    ] = "",
) -> Response:
    if token:
        RequestContext.of(request).credential = _read_token(request, job_id, token)
    job = found(await load_job(request, job_id, *JOB_PREFIXES), "job")
    if last_event_id == END and job.state.is_terminal:
        return Response(status_code=204)
    return EventStream(request, job, Seen.read(last_event_id))
