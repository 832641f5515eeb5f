"""Retries: which errors are retried, after which delay, and that a retry never creates a second job."""

import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from serve_app.client import Client, NotFound, RateLimited, ServiceError, ServiceUnavailable, Unreachable, WaitTimeout
from serve_app.client.clients import Job
from serve_app.client.errors import service_error
from serve_app.client.protocol import (
    BACKOFF_CAP_S,
    BACKOFF_S,
    FIRST_CONTACT_S,
    Action,
    Call,
    Operation,
    Service,
    Sleep,
    advance,
)
from serve_app.client.records import Record
from tests.client.conftest import LORA, PROMPT, LossyTransport
from tests.live import Live

SERVICE = Service(base_url="http://service.test", key="atl_key", interface="a", retry_budget=60)


class UnroutedProxy(httpx.HTTPTransport):
    """Answers the first `unrouted` matching requests with a proxy's own 404, then delivers."""

    def __init__(self, matches: Callable[[httpx.Request], bool], unrouted: int) -> None:
        super().__init__()
        self._matches = matches
        self.unrouted = unrouted

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.unrouted and self._matches(request):
            self.unrouted -= 1
            return httpx.Response(404, text="Path not found. Ping http://service.test/-/routes for available routes.")
        return super().handle_request(request)


def test_a_lost_response_is_retried_and_creates_no_second_job(live: Live) -> None:
    account, key = live.member()
    with Client(live.base_url, key, transport=LossyTransport(1)) as client:
        job = client.generate(PROMPT, lora_id=LORA).wait(timeout=20)
    stored_jobs = live.run(live.resources.job_history.list(account.id))
    assert [stored.id for stored in stored_jobs] == [job.id]


def test_two_calls_create_two_jobs_and_one_idempotency_key_creates_one(client: Client) -> None:
    first, second = (client.generate(PROMPT, lora_id=LORA) for _ in range(2))
    assert first.id != second.id
    mine, again = (client.generate(PROMPT, lora_id=LORA, idempotency_key="order-7") for _ in range(2))
    assert mine.id == again.id


def test_delays_grow_and_end_with_the_retry_budget() -> None:
    delays, error = _outcome_of(lambda: httpx.Response(503), retry_budget=20)
    assert isinstance(error, ServiceUnavailable)
    assert len(delays) >= 3
    for attempt, delay in enumerate(delays):
        longest = min(BACKOFF_CAP_S, BACKOFF_S * 2**attempt)
        assert longest / 2 <= delay <= longest


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honored(form: str) -> None:
    retry_after = "3" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=3))
    delays, _ = _outcome_of(lambda: httpx.Response(429, headers={"Retry-After": retry_after}), retry_budget=5)
    assert delays
    assert all(0.5 <= delay <= 3 for delay in delays)


def test_a_delay_longer_than_the_retry_budget_is_not_begun() -> None:
    delays, error = _outcome_of(lambda: httpx.Response(429, headers={"Retry-After": "3000"}), retry_budget=60)
    assert delays == []
    assert isinstance(error, RateLimited)
    assert error.retry_after == 3000


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 415])
def test_client_errors_are_not_retried(status: int) -> None:
    def refuse() -> httpx.Response:
        return httpx.Response(status, json={"error": {"code": "a_code", "message": "No."}})

    delays, error = _outcome_of(refuse, retry_budget=60)
    assert delays == []
    assert isinstance(error, ServiceError)
    assert (type(error), error.code) == (type(service_error(refuse())), "a_code")
    assert not isinstance(error, ServiceUnavailable)


@pytest.mark.parametrize("status", [404, 500, 502, 503, 504])
@pytest.mark.parametrize("text", ["", "Path '/v1/generate' not found.", "<html>No server is available</html>", "[]"])
def test_errors_of_a_proxy_without_the_service_are_retried(status: int, text: str) -> None:
    delays, error = _outcome_of(lambda: httpx.Response(status, text=text), retry_budget=5)
    assert len(delays) >= 2
    assert isinstance(error, ServiceUnavailable)
    assert error.status == status


@pytest.mark.parametrize(("path", "unrouted"), [pytest.param("/", 2, marks=pytest.mark.slow), ("/files/", 1)])
def test_a_service_that_is_not_routed_yet_is_retried(live: Live, key: str, path: str, unrouted: int) -> None:
    transport = UnroutedProxy(lambda request: request.url.path.startswith(path), unrouted=unrouted)
    with Client(live.base_url, key, transport=transport) as client:
        job = client.generate(PROMPT, lora_id=LORA).wait(timeout=20)
        assert job.images[0].pil().size == (512, 512)
    assert not transport.unrouted


def test_a_missing_image_is_requested_once_more_under_a_fresh_url_and_not_taken_for_its_neighbour() -> None:
    url = "http://storage.test/{}.png"
    images = [{"image_id": each, "url": url.format(each), "width": 1, "height": 1} for each in ("i", "j")]
    record = {"id": "gen_x", "status": "completed", "images": images}
    gone = httpx.Response(404, text="<Error><Code>NoSuchKey</Code></Error>")

    def requested_again(index: int) -> Operation[bytes]:
        """Ask for an image while the first of both is deleted."""
        operation = SERVICE.download(Record.read(record), index)
        assert _call(next(operation)).url == images[index]["url"]
        assert _call(operation.send(gone)).url.endswith("/v1/jobs/gen_x")
        assert _call(operation.send(httpx.Response(200, json={**record, "images": images[1:]}))).url == url.format("j")
        return operation

    operation = requested_again(1)
    for missing in (lambda: operation.send(gone), lambda: requested_again(0)):
        with pytest.raises(NotFound):
            missing()


def test_a_wait_ends_in_time_though_nobody_answers() -> None:
    record = Record.read({"id": "gen_x", "status": "queued"})
    operation = SERVICE.wait(record, 3, lambda _: None)
    delays: list[float] = []

    def refuse_every_poll() -> None:
        outcome = None
        while sum(delays) <= 5:
            action = advance(operation, outcome)
            outcome = None if isinstance(action, Sleep) else httpx.ConnectError("refused")
            if isinstance(action, Sleep):
                delays.append(action.seconds)

    with pytest.raises(WaitTimeout) as ended:
        refuse_every_poll()
    assert isinstance(ended.value.__cause__, Unreachable)
    assert sum(delays) <= 3.5, "the first delay is that between two polls"


def test_a_wait_ends_in_time_though_the_service_is_silent() -> None:
    """The service accepts the connection and says nothing."""
    record = Record.read({"id": "gen_x", "status": "queued"})
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}", "atl_key") as client,
    ):
        began = time.monotonic()
        with pytest.raises(WaitTimeout) as ended:
            Job(client, record).wait(timeout=2)
    assert isinstance(ended.value.__cause__, Unreachable)
    assert time.monotonic() - began < 20, "30 s are the client's own limit of one answer"


@pytest.mark.parametrize(
    ("before", "is_done"),
    [
        ([429], False),
        ([503], True),
        ([502], True),
        ([None], True),
        ([429, None], True),
        ([None, 503], True),
    ],
)
def test_a_missing_job_was_deleted_only_if_an_earlier_call_may_have_done_it(
    before: list[int | None], is_done: bool
) -> None:
    operation = SERVICE.delete("/v1/jobs/gen_x")
    _call(next(operation))
    for status in before:
        action = operation.throw(httpx.ReadError("lost")) if status is None else operation.send(httpx.Response(status))
        assert isinstance(action, Sleep)
        _call(operation.send(None))
    missing = httpx.Response(404, json={"error": {"code": "not_found", "message": "x"}})
    with pytest.raises(StopIteration if is_done else NotFound):
        operation.send(missing)


@pytest.mark.parametrize("key", ["", "order 1", "order-1\n", "ordér", "x" * 256])
def test_an_idempotency_key_that_no_request_can_carry_is_refused_at_once(key: str) -> None:
    with pytest.raises(ValueError, match="idempotency_key"):
        next(SERVICE.create(key, {"prompt": "x"}))


@pytest.mark.parametrize(
    ("answers", "then", "is_soon"),
    [
        ([], httpx.ConnectError("refused"), True),
        ([httpx.Response(503)], httpx.ConnectError("refused"), False),
        ([], httpx.ReadError("reset"), False),
    ],
    ids=["never there", "went away", "lost"],
)
def test_only_a_server_that_was_never_there_is_given_up_soon(
    answers: list[httpx.Response], then: httpx.TransportError, is_soon: bool
) -> None:
    def answer() -> httpx.Response:
        if answers:
            return answers.pop()
        raise then

    delays, error = _outcome_of(answer, retry_budget=30)
    assert isinstance(error, Unreachable)
    assert len(delays) >= 2
    assert sum(delays) <= FIRST_CONTACT_S if is_soon else sum(delays) > 20


def test_a_retry_sends_the_same_idempotency_key() -> None:
    operation = SERVICE.create(None, {"prompt": "x"})
    calls = [_call(next(operation))]
    assert isinstance(operation.send(httpx.Response(503)), Sleep)
    calls.append(_call(operation.send(None)))
    assert calls[0] == calls[1]
    assert len(calls[0].headers["Idempotency-Key"]) >= 32


def _outcome_of(answer: Callable[[], httpx.Response], *, retry_budget: float) -> tuple[list[float], Exception]:
    """The delays of a call that always gets `answer`, and its final error; without really waiting."""
    service = Service(base_url="http://service.test", key="atl_key", interface="a", retry_budget=retry_budget)
    operation: Operation[Any] = service.record("gen_x")
    delays: list[float] = []
    outcome = None
    try:
        while sum(delays) <= retry_budget:
            action, outcome = advance(operation, outcome), None
            if isinstance(action, Sleep):
                delays.append(action.seconds)
                continue
            try:
                outcome = answer()
            except httpx.TransportError as error:
                outcome = error
    except Exception as error:  # noqa: BLE001 the error is the result
        return delays, error
    raise AssertionError("the call was retried for longer than its retry budget")


def _call(action: Action) -> Call:
    assert isinstance(action, Call)
    return action
