"""HTTP calls, retries and polling, without I/O: the logic that the sync and the async client share.

An `Operation` is a generator. It yields a `Call` and is sent the `httpx.Response`; it yields a `Sleep` and is resumed
after that many seconds, a `NextLine` and is sent the line of an open stream, and a `Write` and is resumed when the file
is written; it returns the result. Whatever ends one of these is thrown into it: the transport's error, or Ctrl-C, after
which it may still cancel what it has begun.
"""

import math
import random
import re
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx

from serve_app.client.errors import (
    NotFound,
    RateLimited,
    ServiceError,
    ServiceUnavailable,
    Unreachable,
    WaitTimeout,
    is_expected,
    job_failure,
    service_error,
)
from serve_app.client.records import Record
from serve_app.client.upload import Upload, sent_body, timeout_of

Interface = Literal["a", "b"]
T = TypeVar("T")

BACKOFF_S, BACKOFF_CAP_S = 0.5, 8.0
"""The first and the longest delay before a retry: each doubles the one before, and half of it is random."""
FIRST_CONTACT_S = 3.0
"""How long a client retries where it finds no server and has never had an answer: the address is probably wrong."""
LONG_POLL_S, PROGRESS_S = 20.0, 1.0
"""The service holds the answer to a poll back for this long, and for the shorter time where progress is shown."""
SHORTEST_POLL_S = 1.0
CANCEL_S = 5.0
"""Nobody waits longer for a job to be canceled on the way out."""
POLL_S, POLL_CAP_S = 0.2, 2.0
"""The first and the longest delay between two polls of a job; polls do not count against the plan."""

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_EXPIRED_URL_STATUSES = (403, 404, 410)
"""Storages answer a signed URL that has expired with one of these; if the image is gone, so does a fresh URL."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    json: dict[str, Any] | None = None
    upload: Upload | None = None
    timeout: float | None = None
    """By its nature the answer may take this many seconds, if that is more than the client's own limit."""
    most: float | None = None
    """After this many seconds the answer is of no use, if that is less than the client's own limit."""
    is_image: bool = False
    """Says whether the URL is an image's, which object storage may answer instead of the service."""
    is_stream: bool = False
    """Says whether the lines of the answer are read as they come, by `NextLine`."""
    is_elsewhere: bool = False
    """Says whether the URL is somebody else's, whose redirects are followed."""

    @contextmanager
    def built(self, http: httpx.Client | httpx.AsyncClient) -> Generator[httpx.Request]:
        """Yield the request as httpx sends it; the files of an upload are open meanwhile."""
        timeout = timeout_of(self.timeout, self.most, http.timeout)
        with sent_body(self.upload) as body:
            yield http.build_request(
                self.method, self.url, headers=self.headers, json=self.json, timeout=timeout, **body
            )


@dataclass(frozen=True, slots=True)
class Sleep:
    """A delay before the next call."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NextLine:
    """Reads a line of a stream, None at its end."""

    lines: Any
    """The response's `iter_lines()` or `aiter_lines()`, whichever the client reads."""


@dataclass(frozen=True, slots=True)
class Write:
    """Writes a file."""

    path: Path
    content: bytes


Action = Call | Sleep | NextLine | Write
Operation = Generator[Action, httpx.Response | str | None, T]


@dataclass(kw_only=True)
class Service:
    """The operations of one service with one key on one interface.

    `retry_budget` is the most seconds that one call may spend in delays before retries.
    """

    has_answered: bool = field(default=False, init=False)
    """Whether the client has ever had an answer: a server that goes away then is probably being restarted."""

    base_url: str
    key: str = field(repr=False)
    interface: Interface
    retry_budget: float
    longest_wait: float = LONG_POLL_S
    """The service may hold an answer back for this many seconds."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a bad address or key here, not as a failed connection that is retried.

        A `/v1` at the end of the address, which settings of other clients often have, is left out.
        """
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        try:
            address = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url: {error}") from None
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"base_url: must be an http:// or https:// address, not {self.base_url!r}")
        if not (self.key.isascii() and self.key.isprintable() and self.key):
            raise ValueError("key: must be the printable text that was shown when the key was created")

    def create(self, idempotency_key: str | None, fields: dict[str, Any]) -> Operation[Record]:
        """Create a job by a POST that is safe to retry: the idempotency key returns the first one's job."""
        call = replace(self.call("POST", "/v1/jobs", {"Idempotency-Key": checked_key(idempotency_key)}), json=fields)
        try:
            response = yield from self.send(call)
        except (Exception, GeneratorExit):
            raise
        except BaseException:  # if the service has the job, the same idempotency key tells its id
            answer = yield from _attempt(replace(call, most=CANCEL_S))
            if isinstance(answer, httpx.Response):
                yield from self.give_up(Record.read(answer.json()))
            raise
        return Record.read(response.json(), unknown_words=response.headers.get("X-Unknown-Words", ""))

    def call(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> Call:
        """A call of the service with this client's key, sent as its interface wants it."""
        credential = {"Authorization": f"Bearer {self.key}"} if self.interface == "a" else {"X-API-Key": self.key}
        return Call(method, self.base_url + path, {**credential, **(headers or {})})

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        upload: Upload | None = None,
        timeout: float | None = None,
    ) -> Operation[Any]:
        """The JSON that a call is answered with."""
        call = self.call(method, path, headers)
        return (yield from self.send(replace(call, json=body, upload=upload, timeout=timeout))).json()

    def cancel(self, job_id: str) -> Operation[Record]:
        return then(self.ask("POST", path_of("/v1/jobs", job_id, "cancel")), Record.read)

    def give_up(self, record: Record) -> Operation[Record | None]:
        """Cancel a job on the way out, by one call; None where nobody has answered it in time."""
        call = self.call("POST", path_of("/v1/jobs", record.id, "cancel"))
        answer = yield from _attempt(replace(call, most=CANCEL_S))
        if isinstance(answer, Unreachable):
            return None
        return Record.read(answer.json()) if isinstance(answer, httpx.Response) else record

    def record(self, job_id: str) -> Operation[Record]:
        _, record = yield from self._poll(job_id, 0)
        return record

    def _poll(self, job_id: str, wait_s: int, left: float = math.inf) -> Operation[tuple[httpx.Response, Record]]:
        """Read the record; with `wait_s`, when the job has ended or that time is over.

        All its attempts together end after the `left` seconds, but for one that takes up to `SHORTEST_POLL_S`.
        """
        call = self.call("GET", path_of("/v1/jobs", job_id), {"Prefer": f"wait={wait_s}"} if wait_s else None)
        most = None if left == math.inf else max(left, SHORTEST_POLL_S)
        response = yield from self.send(replace(call, most=most))
        return response, Record.read(response.json())

    def delete(self, path: str) -> Operation[None]:
        """Delete what is at a path; a 404 is a success after a call that may have done so, and had no answer."""
        failures: list[ServiceError | Unreachable] = []
        try:
            yield from self.send(self.call("DELETE", path), failures)
        except NotFound:
            if not any(map(_may_have_acted, failures)):
                raise

    def wait(
        self, record: Record, timeout: float | None, on_record: Callable[[Record], None], *, shows_progress: bool = True
    ) -> Operation[Record]:
        """Poll the job until it has ended, as `watch` does. Raises `JobFailed` when it ended without images."""
        record = yield from self.watch(record, timeout, on_record, shows_progress=shows_progress)
        if record.status != "completed":
            raise job_failure(record.id, record.error_code, record.error_message)
        return record

    def watch(
        self,
        record: Record,
        timeout: float | None,
        on_record: Callable[[Record], None] | None = None,
        *,
        shows_progress: bool = True,
    ) -> Operation[Record]:
        """Poll the job until it has ended, calling `on_record` after each poll.

        The service is asked to hold each answer back until the job has ended, where progress is shown for `PROGRESS_S`:
        one with too many open requests answers at once, and is polled as ever. Raises `WaitTimeout` after `timeout`
        seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        delay, has_waited = POLL_S, False
        longest = PROGRESS_S if shows_progress else self.longest_wait
        while not record.is_final:
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left < (0 if has_waited else delay):
                raise WaitTimeout(f"{record.id} is still {record.status} after {timeout:g} s")
            if not has_waited:
                yield Sleep(delay)
                delay = min(POLL_CAP_S, delay * 1.5)
            wait_s = int(min(longest, max(0.0, left - delay)))
            try:
                response, record = yield from self._poll(record.id, wait_s, left)
            except (Unreachable, RateLimited, ServiceUnavailable) as outage:
                if left >= self.retry_budget:
                    raise
                raise WaitTimeout(f"{record.id} was {record.status}, and then no poll was answered") from outage
            has_waited = "preference-applied" in response.headers
            if on_record is not None:
                on_record(record)
        return record

    def download(self, record: Record, index: int) -> Operation[bytes]:
        """The file's bytes. The URL is signed, so no key is sent; an expired one is fetched again once.

        Raises `NotFound` when the image was deleted.
        """
        try:
            response = yield from self.send(Call("GET", record.images[index].url, is_image=True))
        except ServiceError as error:
            if error.status not in _EXPIRED_URL_STATUSES:
                raise
            fresh = yield from self.record(record.id)
            wanted = record.images[index].image_id  # the index may have changed: a deletion moves the others up
            image = next((each for each in fresh.images if each.image_id == wanted), None)
            if image is None:
                raise
            response = yield from self.send(Call("GET", image.url, is_image=True))
        return response.content

    def send(self, call: Call, failures: list[ServiceError | Unreachable] | None = None) -> Operation[httpx.Response]:
        """Send one call; retry it without an answer, on 429, on 5xx, and on a 404 of another server.

        What was retried is added to `failures`.
        """
        budget, left = self.retry_budget, math.inf if call.most is None else call.most
        for attempt in count():
            began = time.monotonic()
            outcome = yield from _attempt(call)
            self.has_answered |= not isinstance(outcome, Unreachable)
            if isinstance(outcome, httpx.Response):
                return outcome
            if not self.has_answered and isinstance(outcome.__cause__, httpx.ConnectError | httpx.ConnectTimeout):
                budget = min(budget, FIRST_CONTACT_S)
            left -= time.monotonic() - began
            delay = _retry_delay(outcome, attempt)
            if delay is None or delay > min(budget, left):
                raise outcome
            if failures is not None:
                failures.append(outcome)
            budget -= delay
            left -= delay
            yield Sleep(delay)
        raise AssertionError("count() does not end")


def _may_have_acted(error: ServiceError | Unreachable) -> bool:
    """Whether the service may have done what was asked: an outage of its store may come after the change."""
    return isinstance(error, Unreachable) or (error.status >= 500 and error.code != "overloaded")


def path_of(root: str, *parts: str) -> str:
    """The path below `root`, each part quoted."""
    return "/".join((root, *(quote(part, safe="") for part in parts)))


def then(operation: Operation[Any], read: Callable[[Any], T]) -> Operation[T]:
    """Return an operation whose result is what `read` makes of the result of `operation`."""
    return read((yield from operation))


Outcome = httpx.Response | BaseException | str | None


def advance(operation: Operation[Any], outcome: Outcome) -> Action:
    """Give an operation the outcome of its last action, at first None; return the next. Raises `StopIteration`."""
    return operation.throw(outcome) if isinstance(outcome, BaseException) else operation.send(outcome)


def checked_key(idempotency_key: str | None) -> str:
    """The idempotency key, a new one for None.

    Raises `ValueError` for one that no request can carry, which would be retried as a failed connection.
    """
    if idempotency_key is None:
        return str(uuid.uuid4())
    if not _IDEMPOTENCY_KEY.fullmatch(idempotency_key):
        raise ValueError("idempotency_key: must be 1 to 255 visible ASCII characters")
    return idempotency_key


def _attempt(call: Call) -> Operation[httpx.Response | ServiceError | Unreachable]:
    url = httpx.URL(call.url)
    try:
        response = yield call
    except httpx.TransportError as error:
        server = f"{url.scheme}://{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}"
        unreachable = Unreachable(f"no answer from {server}: {error or type(error).__name__}{_advice(error)}")
        unreachable.__cause__ = error
        return unreachable
    assert isinstance(response, httpx.Response), "a Call is answered with a Response"
    if response.is_success and is_expected(response, is_image=call.is_image, is_stream=call.is_stream):
        return response
    return service_error(response, str(url.copy_with(query=None)), from_storage=call.is_image)


def _advice(error: httpx.TransportError) -> str:
    """Ask what to check where no connection could be made, or the server did not answer on one."""
    if "SSL" in str(error):
        return ": does the service speak http:// there, or with a certificate of its own?"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ": does the service run there (`atelier up` prints its address), and is the port right?"
    return ""


def _retry_delay(error: ServiceError | Unreachable, attempt: int) -> float | None:
    """Seconds to wait before a retry; None when a retry would not help."""
    backoff = min(BACKOFF_CAP_S, BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
    if isinstance(error, Unreachable):
        return backoff
    if not isinstance(error, RateLimited | ServiceUnavailable):
        return None
    return backoff if error.retry_after is None else max(error.retry_after, BACKOFF_S)


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
