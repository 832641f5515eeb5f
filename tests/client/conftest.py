"""A live service with one member, for both clients, and a connection that loses answers."""

from collections.abc import Iterator

import httpx
import pytest

from serve_app.client import Client
from tests.live import Live


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


@pytest.fixture
def key(live: Live) -> str:
    """A key for both interfaces."""
    _, secret = live.member()
    return secret


@pytest.fixture
def client(live: Live, key: str) -> Iterator[Client]:
    with Client(live.base_url, key) as client:
        yield client
