"""What is said to the service and in which order, without saying how: the logic that the sync and the async client share.

A `Talk` is a generator. It yields a `Call` and is sent the `httpx.Response` (or thrown the transport's error); it yields
a `Pause` and is resumed after that many seconds; it returns the result.
"""

import random
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx

from serve_app.client.errors import (
    RateLimited,
    ServiceError,
    ServiceUnavailable,
    Unreachable,
    UnsupportedOption,
    WaitTimeout,
    run_failure,
    service_error,
)
from serve_app.client.records import Model, Record

Interface = Literal["a", "b"]
T = TypeVar("T")

BACKOFF_S, BACKOFF_CAP_S = 0.5, 8.0
"""The first pause before a repeat and the longest; each doubles the one before, with half of it left to chance."""
POLL_S, POLL_CAP_S = 0.2, 2.0
"""The first pause between two looks at a run and the longest; polls are not counted against the plan."""

_NO_LONGER_VALID = (403, 404, 410)
"""What storages answer to a signed address that has run out; an image that is really gone answers so again."""


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    json: dict[str, Any] | None = None
    is_of_image: bool = False
    """Whether the address is an image's, which a storage may answer instead of the service."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Talk = Generator[Call | Pause, httpx.Response | None, T]


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service, one key, one interface; `patience` is how many seconds of pauses a single call may cost."""

    base_url: str
    key: str = field(repr=False)
    interface: Interface
    patience: float

    def __post_init__(self) -> None:
        """A bad address or key is told here, once, and not as a failed connection that is tried again."""
        address = httpx.URL(self.base_url)
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"base_url: must be an http:// or https:// address, not {self.base_url!r}")
        if not (self.key.isascii() and self.key.isprintable() and self.key):
            raise ValueError("key: must be the printable text that was shown when the key was made")

    def generate(self, idempotency_key: str | None, options: dict[str, Any]) -> Talk[Record]:
        fields = _generation_fields(self.interface, options)
        return self._create(self.interface, "/v1/generate", fields, idempotency_key)

    def upscale(self, idempotency_key: str | None, image_id: str, scale_factor: int | None) -> Talk[Record]:
        return self._create(
            "a", "/v1/upscale", _given({"image_id": image_id, "scale_factor": scale_factor}), idempotency_key
        )

    def models(self) -> Talk[list[Model]]:
        response = yield from self._exchange(Call("GET", self.base_url + "/v1/models", self._credential("b")))
        return [Model.read(row) for row in response.json()["models"]]

    def record(self, run_id: str, interface: Interface | None = None) -> Talk[Record]:
        speaks = interface or self.interface
        path = "/v1/generate/" if speaks == "a" else "/v1/generations/"
        response = yield from self._exchange(
            Call("GET", self.base_url + path + quote(run_id, safe=""), self._credential(speaks))
        )
        return Record.read(response.json(), speaks)

    def finished(self, record: Record, timeout: float | None, see: Callable[[Record], None]) -> Talk[Record]:
        """Looks at the run until it ended, telling `see` each time.

        Raises `RunFailed` when it ended without images, `WaitTimeout` when it goes on after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = POLL_S
        while not record.is_final:
            if deadline is not None and time.monotonic() + pause > deadline:
                raise WaitTimeout(f"{record.id} is still {record.status} after {timeout:g} s")
            yield Pause(pause)
            pause = min(POLL_CAP_S, pause * 1.5)
            record = yield from self.record(record.id, record.interface)
            see(record)
        if record.status == "failed":
            raise run_failure(record.id, record.error_code, record.error_message)
        return record

    def download(self, record: Record, index: int) -> Talk[bytes]:
        """The PNG's bytes. The address is signed, so no key travels; one that has run out is signed again."""
        try:
            response = yield from self._exchange(Call("GET", record.images[index].url, is_of_image=True))
        except ServiceError as error:
            if error.status not in _NO_LONGER_VALID:
                raise
            fresh = yield from self.record(record.id, record.interface)
            response = yield from self._exchange(Call("GET", fresh.images[index].url, is_of_image=True))
        return response.content

    def _create(
        self, speaks: Interface, path: str, fields: dict[str, Any], idempotency_key: str | None
    ) -> Talk[Record]:
        """A POST that may be repeated: the idempotency key makes a second arrival answer with the first one's run."""
        headers = {**self._credential(speaks), "Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        response = yield from self._exchange(Call("POST", self.base_url + path, headers, fields))
        return Record.read(response.json(), speaks)

    def _credential(self, speaks: Interface) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if speaks == "a" else {"X-API-Key": self.key}

    def _exchange(self, call: Call) -> Talk[httpx.Response]:
        """One call, repeated while that may help, after `Retry-After` or an exponential pause: when there is no answer,
        on 429 and 5xx, and on a 404 that is not the service's own."""
        patience = self.patience
        for attempt in count():
            outcome = yield from _attempt(call)
            if isinstance(outcome, httpx.Response):
                return outcome
            pause = _pause_before_repeat(outcome, attempt)
            if pause is None or pause > patience:
                raise outcome
            patience -= pause
            yield Pause(pause)
        raise AssertionError("count() does not end")


def _attempt(call: Call) -> Talk[httpx.Response | ServiceError | Unreachable]:
    try:
        response = yield call
    except httpx.TransportError as error:
        return Unreachable(f"no answer from {httpx.URL(call.url).host}: {error or type(error).__name__}")
    assert response is not None, "a Call is answered with a Response"
    return response if response.is_success else service_error(response, of_storage=call.is_of_image)


def _pause_before_repeat(error: ServiceError | Unreachable, attempt: int) -> float | None:
    """Seconds to wait before the call is worth repeating; None when it is not."""
    backoff = min(BACKOFF_CAP_S, BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
    if isinstance(error, Unreachable):
        return backoff
    if not isinstance(error, RateLimited | ServiceUnavailable):
        return None
    return backoff if error.retry_after is None else max(error.retry_after, BACKOFF_S)


_SHARED_OPTIONS = ("width", "height", "seed", "lora_weight")
_FIELDS: dict[Interface, dict[str, str]] = {
    "a": {name: name for name in ("prompt", "lora_id", "guidance_scale", "steps", "num_images", *_SHARED_OPTIONS)},
    "b": {name: name for name in ("negative_prompt", *_SHARED_OPTIONS)}
    | {"prompt": "positive_prompt", "lora_id": "model_id", "guidance_scale": "guidance"},
}
"""What each interface calls the options of `generate`; one that is missing is not offered there."""


def _generation_fields(speaks: Interface, options: dict[str, Any]) -> dict[str, Any]:
    names = _FIELDS[speaks]
    given = _given(options)
    for option in given:
        if option not in names:
            raise UnsupportedOption(f"{option}: interface {speaks!r} has no such field")
    return {names[option]: value for option, value in given.items()}


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
