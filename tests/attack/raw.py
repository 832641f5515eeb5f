"""A client that sends any bytes, and reads what comes back by the rules of HTTP/1.1."""

import json
import re
import socket
import time
from dataclasses import dataclass, field

RATE_HEADERS = (
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "ratelimit-policy",
    "ratelimit",
    "x-request-id",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the service."""

    status: int
    headers: list[tuple[str, str]] = field(repr=False)
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header that may be sent once. Raises `AssertionError` when it was sent twice."""
        values = [value for other, value in self.headers if other == name]
        assert len(values) <= 1, (name, values)
        return values[0] if values else None


def exchange(port: int, *parts: bytes, timeout: float = 15, host: str = "127.0.0.1", source: str = "") -> list[Answer]:
    """Send the parts one after the other; return the answers until the service closes or falls silent."""
    with socket.create_connection((host, port), timeout, (source, 0) if source else None) as connection:
        received = b""
        try:
            for index, part in enumerate(parts):
                if index:
                    time.sleep(0.05)  # so that the service reads them one by one
                connection.sendall(part)
            while block := connection.recv(65_536):
                received += block
        except TimeoutError:
            pass
        except ConnectionError:  # it was closed while the request was still being sent
            received += _what_is_left(connection)
        return parse(received)


def first_line(port: int, head: bytes, timeout: float = 5) -> bytes:
    """Send a head without its body; return the first line that comes. Raises `TimeoutError`."""
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        connection.sendall(head)
        return connection.recv(65_536).partition(b"\r\n")[0]


def _what_is_left(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except OSError:
        return b""


def parse(received: bytes) -> list[Answer]:
    """The complete answers in what was received. Raises `AssertionError` when it is not HTTP."""
    answers: list[Answer] = []
    while received:
        head, found, received = received.partition(b"\r\n\r\n")
        assert found, head
        line, *rows = head.decode("latin-1").split("\r\n")
        matched = re.fullmatch(r"HTTP/1\.1 (\d{3}) ?[^\r\n]*", line)
        assert matched, line
        pairs = [row.partition(":") for row in rows]
        headers = [(name.lower(), value.strip()) for name, _, value in pairs]
        status = int(matched[1])
        if status == 100:
            continue
        body, received = _body(dict(headers), received)
        answers.append(Answer(status, headers, body))
    return answers


def _body(headers: dict[str, str], received: bytes) -> tuple[bytes, bytes]:
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(received)
    length = int(headers.get("content-length", "0"))
    if received.startswith(b"HTTP/1.1 "):  # an answer to HEAD has a length and no body
        return b"", received
    return received[:length], received[length:]


def _chunks(received: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, _, received = received.partition(b"\r\n")
        length = int(size, 16) if size else 0
        body, received = body + received[:length], received[length + 2 :]
        if length == 0:
            return body, received


def breach(answer: Answer, *, is_page: bool = False) -> str | None:
    """Return what in the answer breaks the contract; None when nothing does.

    A page refuses in HTML, under its own headers.
    """
    missing = [name for name in RATE_HEADERS if not answer.header(name)]
    if missing:
        return f"{answer.status} without {', '.join(missing)}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{8,128}", answer.header("x-request-id") or ""):
        return f"{answer.status} with the request id {answer.header('x-request-id')!r}"
    if answer.status >= 500 and answer.status != 503:
        return f"{answer.status} {answer.body[:100]!r}"
    if answer.status == 503 and not (answer.header("retry-after") or "").isdecimal():
        return "503 without Retry-After"
    if answer.status == 401 and not answer.header("www-authenticate"):
        return "401 without WWW-Authenticate"
    if answer.status == 405 and not answer.header("allow"):
        return "405 without Allow"
    if is_page and _is_of_a_page(answer):
        return None
    if answer.status >= 400 and answer.body and not _is_envelope(answer):
        return f"{answer.status} {answer.body[:100]!r}"
    return None


def _is_of_a_page(answer: Answer) -> bool:
    """No other site may frame it, nothing may keep it, and no script of it runs but its own."""
    policy = answer.header("content-security-policy") or ""
    return (
        (answer.header("content-type") or "text/html").startswith(("text/html", "text/plain"))
        and "default-src 'none'" in policy
        and "unsafe-inline" not in policy
        and answer.header("cache-control") == "no-store"
        and answer.header("x-content-type-options") == "nosniff"
    )


def _is_envelope(answer: Answer) -> bool:
    if answer.header("content-type") != "application/json":
        return False
    try:
        error = json.loads(answer.body)
    except ValueError:
        return False
    return (
        isinstance(error, dict)
        and set(error) == {"error"}
        and set(error["error"]) == {"code", "message"}
        and all(isinstance(text, str) and text for text in error["error"].values())
    )
