"""Builds successful responses as JSON, from response models or plain values."""

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, Job, JobState

POLL_EVERY_S = 5
"""The documents' example clients poll every 5 seconds; `Retry-After` on an acknowledgement says the same."""

_ENDINGS = {
    JobState.CANCELED: Failure(code=FailureCode.CANCELED, message="The request was canceled."),
    JobState.EXPIRED: Failure(code=FailureCode.EXPIRED, message="The request waited too long and expired."),
}
_FAILED = Failure(code=FailureCode.GENERATION_FAILED, message="The images could not be made.")
_HOST = re.compile(r"[A-Za-z0-9._\-\[\]:]{1,255}")


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


def poll_headers(job: Job) -> dict[str, str]:
    """Return `Retry-After` while the job has not ended."""
    return {} if job.state.is_terminal else {"Retry-After": str(POLL_EVERY_S)}


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


def base_url(request: Request, public_url: str) -> str:
    """Return scheme, host and prefix that callers use: those configured, else this request's."""
    if public_url:
        return public_url.rstrip("/")
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        name, port = request.scope.get("server") or ("localhost", None)
        host = name if port is None else f"{name}:{port}"
    return f"{request.scope['scheme']}://{host}{request.scope.get('root_path', '')}"
