"""The outermost layer handles answers cut short, callers that leave, and forbidden control fields."""

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.middleware import RequestContextMiddleware
from serve_app.api.openapi import json_app
from serve_app.domain.errors import TooManyKeys
from tests.composition import Resources


class Recorder:
    """Records the messages sent to the server."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def error(self) -> tuple[int, str]:
        """The status and the code of an error answer, which tells nothing of its cause."""
        start, body = self.messages
        assert b"secret" not in body["body"]
        return start["status"], json.loads(body["body"])["error"]["code"]


Answer = Callable[..., Awaitable[None]]


@pytest.fixture
def answer(resources: Resources) -> Answer:
    """Answers a request by an application in the middleware, over the real stores."""

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def call(app: ASGIApp, recorder: Recorder, **extra: Any) -> None:
        wrapped = RequestContextMiddleware(app, resources.settings.plan_table, resources.measures, resources.auth)
        usual = {"type": "http", "method": "GET", "path": "/", "scheme": "http", "query_string": b"", "headers": []}
        await wrapped({**usual, "server": ("x", 1), **extra}, nothing, recorder)

    return call


async def test_controls_of_the_server_do_not_pass(answer: Answer) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        await PlainTextResponse("ok")(scope, receive, send)

    headers = [
        (b"x-request-timeout-seconds", b"0"),
        (b"X-Request-Disconnect-Disabled", b"?1"),
        (b"accept", b"*/*"),
    ]
    await answer(app, Recorder(), headers=headers)
    assert seen == [(b"accept", b"*/*")]


async def test_raw_bytes_of_a_query_are_read_as_if_they_were_quoted(answer: Answer) -> None:
    """Starlette's `request.url` raises for them, which pages and error handlers of whole sites ask for."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(str(Request(scope).url.query))
        await PlainTextResponse("ok")(scope, receive, send)

    for query in (b"x=\xff&y=%20+%", b"x=a%2Fb&y=~"):
        await answer(app, Recorder(), query_string=query)
    assert seen == ["x=%FF&y=%20+%", "x=a%2Fb&y=~"]


async def test_an_exception_before_the_answer_is_an_internal_error(answer: Answer) -> None:
    """So is a domain error that no caller may see."""
    own = json_app()

    @own.get("/")
    async def fail() -> None:
        raise TooManyKeys("a secret")

    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a secret")

    for app in (own, bare):
        recorder = Recorder()
        await answer(app, recorder)
        assert recorder.error == (500, "internal_error")


async def test_an_exception_after_the_answer_began_reaches_the_server(answer: Answer) -> None:
    """The server ends such an answer by closing the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("cut")

    recorder = Recorder()
    with pytest.raises(ValueError, match="cut"):
        await answer(app, recorder)
    assert [message["type"] for message in recorder.messages] == ["http.response.start", "http.response.body"]


async def test_an_exception_after_a_whole_answer_is_logged_only(
    answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("own page", status_code=500)(scope, receive, send)
        raise ValueError("already answered")

    recorder = Recorder()
    await answer(app, recorder)
    assert recorder.messages[0]["status"] == 500
    assert recorder.messages[1]["body"] == b"own page"
    assert len(recorder.messages) == 2
    assert "already answered" in caplog.text


async def test_a_caller_that_leaves_is_no_error(answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    recorder = Recorder()
    await answer(app, recorder)
    assert recorder.messages == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_answer_s_own_cache_rule_stays(answer: Answer) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("ok", headers={"Cache-Control": "public, max-age=5"})(scope, receive, send)

    recorder = Recorder()
    await answer(app, recorder)
    headers = dict(recorder.messages[0]["headers"])
    assert headers[b"cache-control"] == b"public, max-age=5"


async def test_the_server_starts_and_stops_the_application(resources: Resources) -> None:
    """What is no request passes the middleware and the dispatcher as it is."""
    events = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Message:
        return {"type": next(events)}

    recorder = Recorder()
    await resources.app()({"type": "lifespan", "state": {}}, receive, recorder)
    assert [message["type"] for message in recorder.messages] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
