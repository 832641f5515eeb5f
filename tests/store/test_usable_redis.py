"""An operator's Redis that cannot be used is refused by its cause and what to do, in seconds."""

import socket
import socketserver
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from deployments.start_checks import check_start
from serve_app.domain.errors import StoreUnavailable
from serve_app.operations.checks import Level
from serve_app.operations.store_checks import check_redis
from serve_app.settings import Settings
from serve_app.store.redis_inspection import require_usable

HELLO_OF_REDIS_5 = b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n"
GOOD = {"redis_version": "7.2.4", "role": "master", "loading": "0", "aof_last_write_status": "ok"}


class _Answer(socketserver.StreamRequestHandler):
    """Answers HELLO and INFO as a server of the facts would, and everything else with OK."""

    def handle(self) -> None:
        facts = cast("_Server", self.server).facts
        while line := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            match words[0].upper():
                case b"HELLO":
                    self.wfile.write(b"%1\r\n+proto\r\n:3\r\n" if facts else HELLO_OF_REDIS_5)
                case b"INFO":
                    info = "".join(f"{name}:{value}\r\n" for name, value in facts.items()).encode()
                    self.wfile.write(b"$%d\r\n%s\r\n" % (len(info), info))
                case b"TIME":
                    self.wfile.write(b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n")
                case b"SCAN":
                    self.wfile.write(b"*2\r\n$1\r\n0\r\n*0\r\n")
                case b"CONFIG":
                    self.wfile.write(b"-ERR unknown command\r\n")
                case _:
                    self.wfile.write(b"+OK\r\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    facts: dict[str, str]


@contextmanager
def server(facts: dict[str, str]) -> Generator[str]:
    with _Server(("127.0.0.1", 0), _Answer) as listener:
        listener.facts = facts
        thread = threading.Thread(target=listener.serve_forever, args=[0.01])
        thread.start()
        yield f"redis://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()
        thread.join()


def start(url: str, **settings: Any) -> None:
    """Start a service as Serve does, up to the replicas."""
    check_start([], Settings(redis_url=url, **settings), spread=False)


def why_not(url: str, require: Callable[[str], None] = require_usable) -> str:
    with pytest.raises(StoreUnavailable) as refused:
        require(url)
    return refused.value.message


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "is too old: 6.2 or later is needed"),
        (GOOD | {"redis_version": "6.0.16"}, "is version 6.0.16: 6.2 or later is needed"),
        (GOOD | {"role": "slave"}, "is a replica, which takes no writes"),
        (GOOD | {"cluster_enabled": "1"}, "is in Cluster mode, where what a script changes lies on several servers"),
        (GOOD | {"loading": "1"}, "is still reading its file"),
        (GOOD | {"aof_last_write_status": "err"}, "cannot write its file: free some space on its disk"),
    ],
)
def test_a_server_that_cannot_be_used(facts: dict[str, str], message: str) -> None:
    with server(facts) as url:
        assert why_not(url).startswith(f"Redis at {url.removeprefix('redis://')} {message}")


def test_a_server_that_can_be_used() -> None:
    with server(GOOD) as url:
        require_usable(url)
        start(url)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"aof_enabled": "0"}, "forgets accepted jobs when it ends: set appendonly yes"),
        ({"maxmemory_policy": "allkeys-lru"}, "deletes jobs when it is full (allkeys-lru): set maxmemory-policy"),
    ],
)
def test_a_server_that_loses_jobs_is_refused_at_a_start_without_asking_for_its_configuration(
    facts: dict[str, str], message: str
) -> None:
    with server(GOOD | facts) as url:
        require_usable(url)
        refused = why_not(url, start)
        start(url, redis_may_lose_jobs=True)
    assert refused.startswith(f"Redis at {url.removeprefix('redis://')} {message}")
    assert refused.endswith("or ATELIER_REDIS_MAY_LOSE_JOBS=true, if jobs may be lost")
    start(url)  # it is gone: a start waits for it

    with server(GOOD | facts | {"cluster_enabled": "1"}) as url:
        assert "is in Cluster mode" in why_not(url, partial(start, redis_may_lose_jobs=True))


def test_the_doctor_judges_a_managed_server_by_what_it_tells(tmp_path: Path) -> None:
    """CONFIG is refused there."""
    with server(GOOD | {"run_id": "a", "used_memory": "1", "aof_enabled": "0"}) as url:
        checks = check_redis(Settings(data_dir=tmp_path, redis_url=url))
        found = next(check for check in checks if check.name == "redis durability")
    assert (found.level, found.found[:39]) == (Level.FAIL, "this Redis forgets accepted jobs when i")


def test_a_server_that_is_not_found() -> None:
    assert "redis.invalid:6379 has a name that cannot be resolved" in why_not("redis://:secret@redis.invalid:6379/0")
    assert "127.0.0.1:9 cannot be reached (Error 111 " in why_not("redis://127.0.0.1:9")
    assert why_not("redis+sentinel://127.0.0.1:9/main").startswith(
        "Redis at 127.0.0.1:9 cannot be reached (No master found for 'main'): start it"
    )


@pytest.mark.slow
def test_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert " does not answer: start it, " in why_not(f"redis://127.0.0.1:{silent.getsockname()[1]}")


def test_a_password_that_is_wrong_or_missing(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("requirepass", "right")
        try:
            path = redis_url.removeprefix("unix://")
            wrong = why_not(f"unix://:wrong@{path}")
            assert wrong.startswith(f"Redis at {path} refuses the user or the password (")
            assert wrong.endswith("): correct ATELIER_REDIS_URL")
            assert why_not(redis_url) == f"Redis at {path} asks for a password: correct ATELIER_REDIS_URL"
            require_usable(f"unix://:right@{path}")
        finally:
            client.config_set("requirepass", "")
