"""A live service with one member, for both clients, and a connection that loses answers."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.client import Client
from serve_app.settings import Settings
from tests.live import Live
from tests.support import adapter_id

LORA = adapter_id("neon")
PROMPT = "purple mountains under a black sky with a yellow moon"


class LossyTransport(httpx.HTTPTransport):
    """Delivers every request, and drops the first `lost` responses to one method, or to any."""

    def __init__(self, lost: int, method: str = "") -> None:
        super().__init__()
        self._lost, self._method = lost, method

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self._lost and self._method in ("", request.method):
            self._lost -= 1
            raise httpx.ReadError("connection reset", request=request)
        return response


class CutTransport(httpx.HTTPTransport):
    """Delivers some requests, and then finds no server."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.left = requests

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.left == 0:
            raise httpx.ConnectError("cut", request=request)
        self.left -= 1
        return super().handle_request(request)


class RecordingTransport(httpx.HTTPTransport):
    """Real connections that keep the requests sent."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return super().handle_request(request)


def with_plan(settings: Settings, folder: Path, *, limit: int, window_s: int) -> Settings:
    """Settings with a plan `tiny` of interface A, of at most `limit` requests in `window_s` seconds."""
    plans = folder / "plans.yaml"
    plans.write_text(yaml.safe_dump([{"interface": "a", "name": "tiny", "limit": limit, "window_s": window_s}]))
    return settings.model_copy(update={"plans": plans})


@pytest.fixture
def key(live: Live) -> str:
    """A key for both interfaces."""
    _, secret = live.member()
    return secret


@pytest.fixture
def client(live: Live, key: str) -> Iterator[Client]:
    with Client(live.base_url, key) as client:
        yield client


@contextmanager
def terminal() -> Generator[Callable[[], str]]:
    """Make stderr a terminal, and yield what reads what was written there since the last call."""
    master, slave = os.openpty()
    os.set_blocking(master, False)

    def shown() -> str:
        parts: list[bytes] = []
        with suppress(BlockingIOError):
            while part := os.read(master, 65536):
                parts.append(part)
        return b"".join(parts).decode()

    try:
        with os.fdopen(slave, "w") as stderr, redirect_stderr(stderr):
            yield shown
    finally:
        os.close(master)
