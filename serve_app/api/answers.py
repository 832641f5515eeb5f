"""Words that every room's answers share: the error envelope, times, and the address the caller used."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, Job, JobState

POLL_EVERY_S = 5
"""The documents' example clients poll every 5 seconds; `Retry-After` on an acknowledgement says the same."""

_ENDINGS = {
    JobState.CANCELED: Failure(code=FailureCode.CANCELED, message="The request was canceled."),
    JobState.EXPIRED: Failure(code=FailureCode.EXPIRED, message="The request waited too long and was dropped."),
}
_FAILED = Failure(code=FailureCode.GENERATION_FAILED, message="The images could not be made.")
_NAME = re.compile(r"[a-z2-7]{26}")
_HOST = re.compile(r"[A-Za-z0-9._\-\[\]:]{1,255}")


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The one shape of every error: `{"error": {"code", "message"}}`."""
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status, headers=headers)


def utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_left(job: Job) -> timedelta:
    """How long the job is expected to take from here, whatever this machine's clock says; zero once it has ended."""
    if job.finish_estimate is None or job.read_at is None:
        return timedelta()
    return job.finish_estimate - job.read_at


def eta_text(job: Job) -> str:
    """When the job is expected to end, or that it has: rounded up to the next whole second, so that it is not in the past
    when it is read."""
    moment = job.finish_estimate or job.read_at
    assert moment is not None, f"{job.id} was read without its standing"
    return utc_text(moment.replace(microsecond=0) + timedelta(seconds=1))


def local_path(scope: Scope, path: str) -> str:
    """`path` as this host knows it: below the prefix the application is served under, if any."""
    return scope.get("root_path", "") + path


def job_id(text: str, *prefixes: str) -> str:
    """`text` if it can be the id of a record at all (a prefix and 26 base32 characters), else an id that no record has."""
    prefix, _, name = text.partition("_")
    return text if prefix in prefixes and _NAME.fullmatch(name) else ""


def base_address(request: Request, public_url: str = "") -> str:
    """Scheme, host and prefix that callers reach us by: the configured address, else the one this caller used."""
    if public_url:
        return public_url.rstrip("/")
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        name, port = request.scope.get("server") or ("localhost", None)
        host = name if port is None else f"{name}:{port}"
    return f"{request.scope['scheme']}://{host}{request.scope.get('root_path', '')}"


def failure_of(job: Job) -> dict[str, str]:
    """Why a job ended without images, in the shape of the error object."""
    failure = job.failure or _ENDINGS.get(job.state, _FAILED)
    return {"code": failure.code, "message": failure.message}


def poll_again(job: Job) -> dict[str, str]:
    """The `Retry-After` hint of a record that has not ended."""
    return {} if job.state.is_terminal else {"Retry-After": str(POLL_EVERY_S)}
