"""The SDK's own errors, for what the service refuses, leaves unanswered or could not draw.

They derive from `AtelierClientError`, and those that the service answers with from `ServiceError`.
"""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx


class AtelierClientError(Exception):
    """Base class of the errors of this package."""


class Unreachable(AtelierClientError):
    """No answer came from the service: it refused, the time was over, or the connection was lost."""


class UnknownLora(AtelierClientError, LookupError):
    """The account may use no LoRA of this name or id, or several have the name; no job was asked for."""


class InvalidSignature(AtelierClientError, ValueError):
    """A message that came to a webhook's address is not signed by its secret, or was signed long ago."""


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


class InvalidRequest(ServiceError):
    """400, 413 or 415: the message names the field and its range."""


class Unauthorized(ServiceError):
    """401: the key is unknown, revoked, expired, or for the other interface, which the message then names."""

    def __str__(self) -> str:
        other = re.match(r"This key is for .*?\b([AB])\)", self.message)
        return super().__str__() + (f": Client(…, interface={other[1].lower()!r}) uses this key" if other else "")


class Forbidden(ServiceError):
    """403: this account may not use this LoRA."""


class NotFound(ServiceError):
    """404: the account has nothing of that name."""


class Conflict(ServiceError):
    """409: the idempotency key was used with another body, the job has not ended, or the quota is used up."""


class RateLimited(ServiceError):
    """429: the plan is used up, or the queue is full."""


class UnexpectedAnswer(ServiceError):
    """2xx or 3xx that is not the service's: the message has the address, and its first words."""


class ServiceUnavailable(ServiceError):
    """5xx, or a 404 that is not the service's own: a proxy without the service."""


class WaitTimeout(AtelierClientError, TimeoutError):
    """The job had not ended after `timeout`; it goes on in the service, and `wait()` may be called again."""


class JobFailed(AtelierClientError):
    """The job ended without images."""

    def __init__(self, job_id: str, code: str, message: str) -> None:
        super().__init__(f"{f'{job_id} has no images' if job_id else 'no job was started'}: {message} ({code})")
        self.job_id = job_id
        self.code = code
        self.message = message


class JobCanceled(JobFailed):
    """The job was canceled."""


class JobExpired(JobFailed):
    """The job waited longer than the service allows."""


_BY_STATUS: dict[int, type[ServiceError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: RateLimited,
}
_IMAGE = re.compile(rb"\x89PNG|\xff\xd8\xff|RIFF.{4}WEBP", re.DOTALL)
"""A PNG, a JPEG or a WebP begins with one of these."""
_BY_CODE: dict[str, type[JobFailed]] = {"canceled": JobCanceled, "expired": JobExpired}


def service_error(response: httpx.Response, url: str = "", *, from_storage: bool = False) -> ServiceError:
    """The error for an answer of `url` that is no success, or not the service's.

    `from_storage`: the answer is to an image's URL, where an object storage has its own body for a missing file.
    """
    error, status = _error_object(response), response.status_code
    message = (
        error.get("message") or f"the answer of {url or 'the address'} is not the service's: {_first_words(response)}"
    )
    kind = _BY_STATUS.get(status, ServiceUnavailable if status >= 500 else InvalidRequest)
    if status < 400:
        kind = UnexpectedAnswer
    if status == 404 and not error and not from_storage:
        kind = ServiceUnavailable
    return kind(
        str(message),
        status=status,
        code=str(error.get("code") or "unknown"),
        request_id=response.headers.get("x-request-id", ""),
        retry_after=_seconds(response.headers.get("retry-after")),
    )


def job_failure(job_id: str, code: str, message: str) -> JobFailed:
    """The error for a job that ended without images."""
    return _BY_CODE.get(code, JobFailed)(job_id, code, message)


def is_expected(response: httpx.Response, *, is_image: bool, is_stream: bool) -> bool:
    """Return whether a success has the expected body.

    That is an image if `is_image`, events if `is_stream`, else a JSON object, or nothing with 204.
    """
    if is_stream:
        return sends_events(response)
    if is_image:
        return _IMAGE.match(response.content) is not None
    return response.status_code == 204 or _json_object(response) is not None


def sends_events(response: httpx.Response) -> bool:
    return response.is_success and response.headers.get("content-type", "").startswith("text/event-stream")


def _error_object(response: httpx.Response) -> dict[str, Any]:
    """The `error` object of the body; empty when a proxy or a storage answered instead of the service."""
    inner = (_json_object(response) or {}).get("error")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}


def _json_object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        body = response.json()
    except ValueError:
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def _first_words(response: httpx.Response) -> str:
    """Return where a redirect leads, or else the beginning of the text without its tags."""
    if location := response.headers.get("location"):
        return f"it leads to {location}"
    words = " ".join(re.sub(r"<[^>]*>", " ", response.text[:2000]).split())
    return f"{words[:80]!r}" if words else response.reason_phrase or "it is empty"


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` in seconds, from a number or an HTTP date."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        when = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds()) if when.tzinfo else None
