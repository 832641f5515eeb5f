"""A live service with one member, for both clients."""

from collections.abc import Iterator

import pytest
import redis

from serve_app.settings import Settings
from tests.live import Live, live_service


@pytest.fixture
def live(settings: Settings, redis_db: redis.Redis) -> Iterator[Live]:
    with live_service(settings) as service:
        yield service


@pytest.fixture
def key(live: Live) -> str:
    """A key for both interfaces."""
    _, secret = live.member()
    return secret
