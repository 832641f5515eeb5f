"""A second server for long games: the same scripts without waiting for the disk."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from serve_app.stores.embedded import ensure_redis, stop_redis


@pytest.fixture(scope="session")
def game_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Use one database per test: `Bench` empties it."""
    home = tmp_path_factory.mktemp("games")
    server = ensure_redis(home)
    with redis.Redis.from_url(server.url) as client:
        cast(Any, client).config_set("appendfsync", "no")
    yield server.url
    stop_redis(home)
