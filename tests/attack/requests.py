"""A hostile request of one kind, and how its bytes are put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A request in one or more parts that are sent one after the other."""

    name: str
    parts: tuple[bytes, ...]
    is_http: bool = True
    """False for bytes that HAProxy's parser refuses: the connection may be closed without an answer."""
    waits: bool = False
    """It is never complete: the answer, if any, comes when the time for it has passed."""
    statuses: tuple[int, ...] = ()
    """The statuses that are right, where the kind allows no other."""
    is_checked: bool = False
    """It brings a file, which a process reads before the answer: with others that takes minutes."""
    is_page: bool = False
    """A person is answered, in HTML, and not a program."""


def one(name: str, text: bytes, *statuses: int, **marks: Any) -> Kind:
    """Return a kind that is sent in one part."""
    return Kind(name, (text,), statuses=statuses, **marks)


def odd(name: str, text: bytes, *, waits: bool = False) -> Kind:
    """Return a kind in one part that HAProxy's parser may refuse."""
    return Kind(name, (text,), is_http=False, waits=waits)


class Requests:
    """Writes requests to the service whose address is `host`, with a key of it where they have one."""

    def __init__(self, host: str, secret: str) -> None:
        self.host = f"Host: {host}\r\n".encode()
        self.key = f"Authorization: Bearer {secret}\r\n".encode()
        self.secret = secret

    def request(self, line: str, *rows: str | bytes, body: bytes = b"", closes: bool = True) -> bytes:
        """A request with this service's Host, and with `Connection: close` unless others follow it."""
        text = b"".join((row if isinstance(row, bytes) else row.encode("latin-1")) + b"\r\n" for row in rows)
        end = b"Connection: close\r\n" if closes else b""
        return line.encode("latin-1") + b"\r\n" + self.host + text + end + b"\r\n" + body

    def post(self, *rows: str | bytes, body: bytes = b"", path: str = "/v1/generate", closes: bool = True) -> bytes:
        return self.request(f"POST {path} HTTP/1.1", *rows, body=body, closes=closes)

    def json(self, body: bytes, *rows: str | bytes, path: str = "/v1/generate") -> bytes:
        return self.post(self.key.strip(), f"Content-Length: {len(body)}", *rows, body=body, path=path)


def trailed(host: str, rows: Sequence[str], trailer: str) -> tuple[bytes, bytes]:
    """Return a chunked generation with a trailer, of an unknown LoRA: its head, and what follows."""
    body = b'{"prompt":"a boat","lora_id":"model_x"}'
    lines = ("POST /v1/generate HTTP/1.1", f"Host: {host}", *rows, "Transfer-Encoding: chunked", "Connection: close")
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return head, b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(body), body, trailer.encode())
