"""Fixtures of every room: a real Redis on a private socket, settings, opened stores."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from serve_app.service.resources import Resources, open_resources
from serve_app.settings import Settings
from serve_app.stores.embedded import ensure_redis, stop_redis
from tests.support import POCKET, write_catalog


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real server for the session. It is shared: use `redis_db` to start from nothing."""
    home = tmp_path_factory.mktemp("redis")
    yield ensure_redis(home).url
    stop_redis(home)


@pytest.fixture
def redis_db(redis_url: str) -> Iterator[redis.Redis]:
    """The session's server, emptied, through a plain blocking client."""
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def pocket() -> Path:
    """The embedded demo model's folder."""
    return POCKET


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> Settings:
    """A service of its own in a temporary directory, with the test catalog."""
    return Settings(data_dir=tmp_path / "var", redis_url=redis_url, catalog=write_catalog(tmp_path / "catalog"))


@pytest.fixture
async def resources(settings: Settings, redis_db: redis.Redis) -> AsyncIterator[Resources]:
    """Opened stores over an empty Redis."""
    async with open_resources(settings) as opened:
        yield opened
