"""Which servers lack fixes that others of their line have."""

import pytest

from serve_app.stores.embedded import embedded_release, ensure_redis, stop_redis
from serve_app.stores.redis_releases import PATCHED, parse_version, patched_release


@pytest.mark.parametrize(
    ("server", "version", "newer"),
    [
        ("redis", "6.2.14", "6.2.24"),
        ("redis", "6.2.24", None),
        ("redis", "7.0.15", "7.2.16"),
        ("redis", "8.0.4", "8.2.10"),
        ("redis", "8.10.2", None),
        ("redis", "9.0.0", None),
        ("valkey", "7.2.11", "7.2.13"),
        ("valkey", "8.1.4", "8.1.7"),
        ("valkey", "9.1.1", None),
        ("valkey", "9.2.0", None),
        ("redis", "unknown", "6.2.24"),
        ("another", "1.0", None),
    ],
)
def test_the_release_to_take_instead(server: str, version: str, newer: str | None) -> None:
    assert patched_release(server, version) == newer


def test_every_patched_release_is_of_its_line() -> None:
    assert all(release[:2] == line for lines in PATCHED.values() for line, release in lines.items())


def test_the_start_says_which_server_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("server")
    running = ensure_redis(home)
    try:
        is_old = patched_release(running.server, running.version) is not None
        assert embedded_release(home).startswith(f"{running.server} {running.version}")
        assert ("atelier doctor" in embedded_release(home)) is is_old
    finally:
        stop_redis(home)


def test_versions_are_compared_as_numbers() -> None:
    assert parse_version("Redis server v=8.10.2 sha=0") > parse_version("8.9.9") > parse_version("nothing")
