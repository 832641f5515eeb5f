"""Forms that are too large, too slow or no forms: refused with a page, over a real socket."""

import socket
from urllib.parse import urlsplit

import pytest

from serve_app.api import middleware
from serve_app.web.site import forms
from tests.attack.raw import Answer, exchange
from tests.live import Live

FORM_TYPE = "application/x-www-form-urlencoded"


@pytest.fixture
def port(live: Live) -> int:
    return urlsplit(live.base_url).port or 0


@pytest.mark.parametrize(("length", "pieces"), [(100, 0), (10_000, 40)], ids=["a part arrives", "it trickles in"])
def test_a_form_that_does_not_arrive_in_time_is_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch, length: int, pieces: int
) -> None:
    """A byte now and then is no reason to wait longer."""
    monkeypatch.setattr(middleware, "GRACE_S", 0.2)
    (answer,) = exchange(port, _post(port, length=length) + b"name=", *[b"a"] * pieces)
    assert answer.status == 408
    assert "did not arrive in time" in _page(answer)


@pytest.mark.slow
def test_others_are_served_while_forms_are_half_sent(port: int) -> None:
    half = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    for connection in half:
        connection.sendall(_post(port, length=100) + b"name=a")
    (answer,) = exchange(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.status == 200
    for connection in half:
        connection.close()


@pytest.mark.parametrize(("length", "body"), [(forms.FORM_BYTES + 1, b""), (None, b"x" * (forms.FORM_BYTES + 1))])
def test_a_form_that_is_too_large_is_refused(port: int, length: int | None, body: bytes) -> None:
    """A declared length is refused before a byte of the body is read; without one the bytes are counted."""
    sent = body if length is not None else b"%x\r\n%s\r\n" % (len(body), body)
    (answer,) = exchange(port, _post(port, length=length) + sent)
    assert answer.status == 413
    assert "too large" in _page(answer)


@pytest.mark.parametrize(
    "media_type", ["multipart/form-data; boundary=x", "application/json", "text/plain", "", f"{FORM_TYPE}x"]
)
def test_what_is_not_declared_as_a_form_is_not_read_as_one(port: int, media_type: str) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nowner\r\n--x--\r\n'
    (answer,) = exchange(port, _post(port, length=len(body), media_type=media_type, close=True) + body)
    assert answer.status == 415
    assert FORM_TYPE in _page(answer)


def test_a_form_of_many_fields_is_refused(port: int) -> None:
    body = b"&".join(b"f%d=" % number for number in range(200))
    (answer,) = exchange(port, _post(port, length=len(body), close=True) + body)
    assert answer.status == 400
    assert "too many fields" in _page(answer)


def test_a_media_type_with_a_parameter_in_any_case_is_a_form(port: int) -> None:
    body = b"name=%C3%B6wner&password=x"
    media_type = "Application/X-WWW-Form-URLencoded; charset=UTF-8"
    (answer,) = exchange(port, _post(port, length=len(body), media_type=media_type, close=True) + body)
    assert answer.status == 403
    assert "öwner" in _page(answer), "what was typed is shown again"


def _post(port: int, *, length: int | None, media_type: str = FORM_TYPE, close: bool = False) -> bytes:
    """Return the head of a request with a sign-in form; without a length the body is sent in chunks."""
    lines = [
        "POST /console/sign-in HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Origin: http://127.0.0.1:{port}",
        f"Content-Type: {media_type}",
        "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, *(["Connection: close"] if close else [])]).encode() + b"\r\n\r\n"


def _page(answer: Answer) -> str:
    """Return the answer's text, which must be a page.

    The connection must end where a body was left unread.
    """
    assert (answer.header("content-type") or "").startswith("text/html")
    assert answer.header("content-security-policy")
    assert answer.header("connection") == "close"
    return answer.body.decode()
