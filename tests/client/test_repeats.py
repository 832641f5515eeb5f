"""Calls that meet trouble: what is repeated, after how long, and that a repeat never makes a second run."""

from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from serve_app.client import Client, NotFound, RateLimited, ServiceError, ServiceUnavailable, Unreachable
from serve_app.client.errors import service_error
from serve_app.client.records import Record
from serve_app.client.talk import BACKOFF_CAP_S, BACKOFF_S, Call, Pause, Service
from tests.live import Live
from tests.support import adapter_id

LORA = adapter_id("outline")
SERVICE = Service(base_url="http://house.test", key="atl_key", interface="a", patience=60)


class LosesAnswers(httpx.HTTPTransport):
    """Delivers every request and drops the first `lost` answers, as a connection that breaks at the wrong moment does."""

    def __init__(self, lost: int) -> None:
        super().__init__()
        self._lost = lost

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self._lost:
            self._lost -= 1
            raise httpx.ReadError("connection reset", request=request)
        return response


class Proxy(httpx.HTTPTransport):
    """Knows no service for the first requests of a kind, and says so as a proxy does; then it delivers."""

    def __init__(self, concerns: Callable[[httpx.Request], bool], unrouted: int) -> None:
        super().__init__()
        self._concerns = concerns
        self.unrouted = unrouted

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.unrouted and self._concerns(request):
            self.unrouted -= 1
            return httpx.Response(404, text="Path not found. Ping http://house.test/-/routes for available routes.")
        return super().handle_request(request)


def test_a_lost_answer_is_asked_for_again_and_makes_no_second_run(live: Live) -> None:
    account, key = live.member()
    with Client(live.base_url, key, transport=LosesAnswers(1)) as client:
        run = client.generate("a lighthouse", lora_id=LORA).wait(timeout=20)
    jobs = live.do(live.resources.jobs.list(account.id))
    assert [job.id for job in jobs] == [run.id]


def test_two_calls_make_two_runs_and_an_idempotency_key_of_ones_own_makes_one(live: Live, key: str) -> None:
    with Client(live.base_url, key) as client:
        first, second = (client.generate("a lighthouse", lora_id=LORA) for _ in range(2))
        assert first.id != second.id
        mine, again = (client.generate("a lighthouse", lora_id=LORA, idempotency_key="order-7") for _ in range(2))
        assert mine.id == again.id


def test_pauses_grow_and_end_when_patience_does() -> None:
    pauses, error = _met_with(lambda: httpx.Response(503), patience=20)
    assert isinstance(error, ServiceUnavailable)
    assert len(pauses) >= 3
    for attempt, pause in enumerate(pauses):
        longest = min(BACKOFF_CAP_S, BACKOFF_S * 2**attempt)
        assert longest / 2 <= pause <= longest


@pytest.mark.parametrize("retry_after", ["3", format_datetime(datetime.now(UTC) + timedelta(seconds=3, days=0))])
def test_retry_after_is_honoured(retry_after: str) -> None:
    pauses, _ = _met_with(lambda: httpx.Response(429, headers={"Retry-After": retry_after}), patience=5)
    assert pauses
    assert all(0.5 <= pause <= 3 for pause in pauses)


def test_a_wait_longer_than_patience_is_not_begun() -> None:
    pauses, error = _met_with(lambda: httpx.Response(429, headers={"Retry-After": "3000"}), patience=60)
    assert pauses == []
    assert isinstance(error, RateLimited)
    assert error.retry_after == 3000


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 415])
def test_what_would_be_answered_the_same_is_not_asked_again(status: int) -> None:
    def refuse() -> httpx.Response:
        return httpx.Response(status, json={"error": {"code": "a_code", "message": "No."}})

    pauses, error = _met_with(refuse, patience=60)
    assert pauses == []
    assert isinstance(error, ServiceError)
    assert (type(error), error.code) == (type(service_error(refuse())), "a_code")
    assert not isinstance(error, ServiceUnavailable)


@pytest.mark.parametrize("status", [404, 500, 502, 503, 504])
@pytest.mark.parametrize("words", ["", "Path '/v1/generate' not found.", "<html>No server is available</html>", "[]"])
def test_what_a_proxy_says_without_the_service_is_asked_again(status: int, words: str) -> None:
    pauses, error = _met_with(lambda: httpx.Response(status, text=words), patience=5)
    assert len(pauses) >= 2
    assert isinstance(error, ServiceUnavailable)
    assert error.status == status


def test_a_service_that_is_not_routed_yet_is_waited_for(live: Live) -> None:
    _, key = live.member()
    transport = Proxy(lambda request: True, unrouted=2)
    with Client(live.base_url, key, transport=transport) as client:
        run = client.generate("a lighthouse", lora_id=LORA).wait(timeout=20)
    assert run.images
    assert not transport.unrouted


def test_an_image_behind_such_a_proxy_is_opened_too(live: Live) -> None:
    _, key = live.member()
    transport = Proxy(lambda request: request.url.path.startswith("/files/"), unrouted=1)
    with Client(live.base_url, key, transport=transport) as client:
        run = client.generate("a lighthouse", lora_id=LORA).wait(timeout=20)
        assert run.images[0].pil().size == (512, 512)


def test_an_image_that_its_storage_has_not_is_asked_for_once_more_and_not_waited_for() -> None:
    url = "http://storage.test/x.png"
    record = {
        "request_id": "gen_x",
        "status": "completed",
        "images": [{"image_id": "i", "url": url, "width": 1, "height": 1}],
    }
    talk = SERVICE.download(Record.read(record, "a"), 0)
    gone = httpx.Response(404, text="<Error><Code>NoSuchKey</Code></Error>")
    assert _call(next(talk)).url == url
    assert _call(talk.send(gone)).url.endswith("/v1/generate/gen_x")
    assert _call(talk.send(httpx.Response(200, json=record))).url == url
    with pytest.raises(NotFound):
        talk.send(gone)


def test_no_answer_at_all_is_unreachable_after_patience() -> None:
    def refuse() -> httpx.Response:
        raise httpx.ConnectError("refused")

    pauses, error = _met_with(refuse, patience=5)
    assert len(pauses) >= 2
    assert isinstance(error, Unreachable)


def test_a_repeat_carries_the_same_idempotency_key() -> None:
    talk = SERVICE.generate(None, {"prompt": "x", "lora_id": "model_x"})
    calls = [_call(next(talk))]
    assert isinstance(talk.send(httpx.Response(503)), Pause)
    calls.append(_call(talk.send(None)))
    assert calls[0] == calls[1]
    assert len(calls[0].headers["Idempotency-Key"]) >= 32


def _met_with(answer: Callable[[], httpx.Response], *, patience: float) -> tuple[list[float], Exception]:
    """The pauses of a call that always meets `answer`, and the error it ends with. Nobody really waits: what would be
    slept is taken off the patience."""
    service = Service(base_url="http://house.test", key="atl_key", interface="a", patience=patience)
    talk: Generator[Call | Pause, httpx.Response | None, Any] = service.record("gen_x")
    pauses: list[float] = []
    try:
        wish = next(talk)
        while sum(pauses) <= patience:
            if isinstance(wish, Pause):
                pauses.append(wish.seconds)
                wish = talk.send(None)
                continue
            try:
                response = answer()
            except httpx.TransportError as error:
                wish = talk.throw(error)
            else:
                wish = talk.send(response)
    except Exception as error:  # noqa: BLE001 the error is what is asked about
        return pauses, error
    raise AssertionError("the call was repeated for longer than its patience")


def _call(wish: Call | Pause) -> Call:
    assert isinstance(wish, Call)
    return wish
