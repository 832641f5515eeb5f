"""Clients that send nothing, or not all: they are shown out, and nobody else waits for them."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Generator

import pytest

from tests.attack.raw import parse
from tests.deployments.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

HEADERS_LIMIT_S = 10.0
"""`timeout http-request` in `deployments/proxy/defaults.cfg` says the same."""
POLL = "/v1/generate/gen_" + "a" * 26


def sign_in(port: int) -> bytes:
    """The head of a sign-in form and a part of its body."""
    lines = [
        "POST /console/sign-in HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Origin: http://127.0.0.1:{port}",
        "Content-Type: application/x-www-form-urlencoded",
        "Content-Length: 100",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\nname=a"


@contextlib.contextmanager
def held(port: int, count: int, sent: bytes = b"") -> Generator[list[socket.socket]]:
    """That many connections, on each of which no more than `sent` is sent."""
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.sendall(sent)
            connections.append(connection)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def open_ones(connections: list[socket.socket]) -> int:
    """How many the service has not closed."""
    return sum(is_open(connection) for connection in connections)


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def receive_all(connection: socket.socket) -> bytes:
    """What comes until the service closes the connection."""
    connection.settimeout(30)
    received = b""
    while block := connection.recv(65_536):
        received += block
    return received


class Callers:
    """Others who poll meanwhile, each on a new connection: how long their calls took, and what went wrong."""

    def __init__(self, port: int, secret: str, count: int = 4, pause_s: float = 0.1) -> None:
        self._port, self._secret, self._pause_s = port, secret, pause_s
        self._stopped = threading.Event()
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._poll) for _ in range(count)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * share))]

    def _poll(self) -> None:
        while not self._stopped.wait(self._pause_s):
            began = time.monotonic()
            try:
                status = self._call()
            except OSError as error:
                self.failures.append(repr(error))
            else:
                self.seconds.append(time.monotonic() - began)
                if status != 404:
                    self.failures.append(f"status {status}")

    def _call(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", POLL, headers={"Authorization": f"Bearer {self._secret}"})
            answer = connection.getresponse()
            answer.read()
            return answer.status


def test_slow_clients_are_shown_out_while_others_are_served(service: Service) -> None:
    """So is a client whose headers trickle in: a byte now and then is no reason to wait longer."""
    half = sign_in(service.port)
    key = f"Authorization: Bearer {service.ready['keys']['both']}"
    posted = f"POST /v1/generate HTTP/1.1\r\nHost: a\r\n{key}\r\nContent-Length: 9"
    with (
        Callers(service.port, service.ready["keys"]["both"]) as others,
        Trickle(service.port) as trickle,
        held(service.port, 200) as silent,
        held(service.port, 400, half) as unfinished,
        held(service.port, 100, posted.encode() + b"\r\n\r\n{") as half_posted,
        held(service.port, 50, b"GET /healthz HTTP/1.1\r\nHos") as heads,
    ):
        service.until(lambda: open_ones([*silent, *heads]) == 0, limit=HEADERS_LIMIT_S + 5)
        for connection in (*unfinished, *half_posted):
            (answer,) = parse(receive_all(connection))
            assert answer.status == 408
    assert HEADERS_LIMIT_S - 1 < trickle.seconds < HEADERS_LIMIT_S + 5
    assert not others.failures
    assert len(others.seconds) > 50
    assert others.percentile(0.99) < 5


class Trickle:
    """A client who sends a byte of its headers now and then, until it is shown out after `seconds`."""

    def __init__(self, port: int) -> None:
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._send, args=[port])

    def __enter__(self) -> "Trickle":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _send(self, port: int) -> None:
        began = time.monotonic()
        with held(port, 1, b"GET /healthz HTTP/1.1\r\nX-A: ") as (connection,), contextlib.suppress(OSError):
            while is_open(connection) and time.monotonic() - began < 2 * HEADERS_LIMIT_S:
                connection.settimeout(1)
                connection.sendall(b"a")
                threading.Event().wait(0.5)
        self.seconds = time.monotonic() - began
