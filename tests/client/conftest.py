"""A live service with one member, for both clients, and a connection that loses answers."""

from collections.abc import Iterator

import httpx
import pytest
import redis

from serve_app.settings import Settings
from tests.live import Live, live_service


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
def live(settings: Settings, redis_db: redis.Redis) -> Iterator[Live]:
    with live_service(settings) as service:
        yield service


@pytest.fixture
def key(live: Live) -> str:
    """A key for both interfaces."""
    _, secret = live.member()
    return secret
