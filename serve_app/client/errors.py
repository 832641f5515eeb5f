"""What can go wrong on the caller's side of the service, as one tree.

AtelierClientError
├── UnsupportedOption        this interface has no such field; nothing was sent
├── Unreachable              no answer came: refused, timed out, cut off
├── ServiceError             an error answer: .status .code .message .request_id .retry_after
│   ├── InvalidRequest       400, 413, 415: the message names the field and its range
│   ├── Unauthorized         401: the key is unknown, revoked, expired, or made for the other interface
│   ├── Forbidden            403: this account may not use this LoRA
│   ├── NotFound             404
│   ├── Conflict             409: the idempotency key was used with another body
│   ├── RateLimited          429: over the plan, or the queue is full
│   └── ServiceUnavailable   5xx, or a 404 in words that are not the service's: a proxy with nothing behind it
├── WaitTimeout              still running when the caller's patience ended; wait() again later
└── RunFailed                the run ended without images: .run_id .code .message
    ├── RunCanceled
    └── RunExpired
"""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx


class AtelierClientError(Exception):
    """Every error of this package."""


class UnsupportedOption(AtelierClientError, ValueError):
    """The chosen interface has no field for this option."""


class Unreachable(AtelierClientError):
    """No answer came from the service."""


class ServiceError(AtelierClientError):
    """The service answered with an error."""

    def __init__(self, message: str, *, status: int, code: str, request_id: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message} ({self.status} {self.code}{', ' + self.request_id if self.request_id else ''})"


class InvalidRequest(ServiceError): ...


class Unauthorized(ServiceError): ...


class Forbidden(ServiceError): ...


class NotFound(ServiceError): ...


class Conflict(ServiceError): ...


class RateLimited(ServiceError): ...


class ServiceUnavailable(ServiceError): ...


class WaitTimeout(AtelierClientError, TimeoutError):
    """The run goes on in the service; only the waiting ended."""


class RunFailed(AtelierClientError):
    """The run ended without images."""

    def __init__(self, run_id: str, code: str, message: str) -> None:
        super().__init__(f"{run_id} failed: {message} ({code})")
        self.run_id = run_id
        self.code = code
        self.message = message


class RunCanceled(RunFailed): ...


class RunExpired(RunFailed): ...


_BY_STATUS: dict[int, type[ServiceError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: RateLimited,
}
_BY_CODE: dict[str, type[RunFailed]] = {"canceled": RunCanceled, "expired": RunExpired}


def service_error(response: httpx.Response, *, of_storage: bool = False) -> ServiceError:
    """The error of the tree that an answer of 400 or more stands for.

    `of_storage`: it came from an image's address, where a storage says in its own words that there is no such file.
    """
    error, status = _error_object(response), response.status_code
    said = error.get("message") or response.reason_phrase or "error"
    kind = _BY_STATUS.get(status, ServiceUnavailable if status >= 500 else InvalidRequest)
    if status == 404 and not error and not of_storage:
        kind, said = ServiceUnavailable, f"something else than the service answers here: {said}"
    return kind(
        str(said),
        status=status,
        code=str(error.get("code") or "unknown"),
        request_id=response.headers.get("x-request-id", ""),
        retry_after=_seconds(response.headers.get("retry-after")),
    )


def run_failure(run_id: str, code: str, message: str) -> RunFailed:
    return _BY_CODE.get(code, RunFailed)(run_id, code, message)


def _error_object(response: httpx.Response) -> dict[str, Any]:
    """The envelope's inside; empty when something between here and the service answered in its own words."""
    try:
        body = response.json()
    except ValueError:
        return {}
    inside = cast("dict[str, Any]", body).get("error") if isinstance(body, dict) else None
    return cast("dict[str, Any]", inside) if isinstance(inside, dict) else {}


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` in seconds, from either of its two forms."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        when = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds()) if when.tzinfo else None
