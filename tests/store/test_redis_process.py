"""One server works on a data directory, whatever freezes, and no other process is killed."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_app.domain.errors import StoreUnavailable
from serve_app.store.embedded_redis import ensure_redis, running_redis, stop_redis
from serve_app.store.locked_exec import locked_command
from serve_app.store.redis_process import LOCK_FILE, server_binary, server_process
from tests.store.redis_servers import servers_in
from tests.support import plain_redis, wait_until

PROMPTLY_S = 15.0
"""A server is silent after five seconds; the rest is for a crowded machine."""


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in servers_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


def client_in(data_dir: Path) -> Any:
    return plain_redis(f"unix://{data_dir}/redis/redis.sock")


def start_under_lock(home: Path, *command: str, cwd: Path | None = None) -> None:
    """Start a program under the server's lock, unless that is held."""
    with (home / LOCK_FILE).open("ab") as lock:
        locked, quiet = locked_command(lock.fileno(), list(command)), subprocess.DEVNULL
        subprocess.run(locked, cwd=cwd or home, pass_fds=[lock.fileno()], stdout=quiet, stderr=quiet, check=True)


def keep_something(data_dir: Path) -> None:
    with client_in(data_dir) as client:
        client.set("kept", "yes")


def is_kept(data_dir: Path) -> bool:
    with client_in(data_dir) as client:
        return client.get("kept") == "yes"


@pytest.fixture
async def server(data_dir: Path) -> int:
    """Start a server that holds one key; return its process id."""
    pid = ensure_redis(data_dir).pid
    assert ensure_redis(data_dir).pid == pid
    keep_something(data_dir)
    return pid


async def test_a_frozen_server_is_waited_for_by_one_caller_and_the_others_get_an_error(
    data_dir: Path, server: int
) -> None:
    os.kill(server, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(ask, data_dir) for ask in (ensure_redis, ensure_redis, ensure_redis, running_redis)]
        await wait_until(lambda: sum(call.done() for call in calls) == 3, timeout=PROMPTLY_S)
        (waiting,) = [call for call in calls if not call.done()]
        for call in calls:
            if call is not waiting:
                with pytest.raises(StoreUnavailable, match="does not answer"):
                    call.result()
        assert servers_in(data_dir) == [server]
        os.kill(server, signal.SIGCONT)
        found = waiting.result(timeout=PROMPTLY_S)
    assert found is not None
    assert found.pid == server
    assert servers_in(data_dir) == [server]


async def test_a_server_that_stays_silent_is_killed_and_then_replaced(data_dir: Path, server: int) -> None:
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    replacement = ensure_redis(data_dir, silence_s=2.5)
    assert time.monotonic() - began >= 2.5
    assert servers_in(data_dir) == [replacement.pid] != [server]
    assert is_kept(data_dir)


def test_a_frozen_server_is_stopped_in_time(data_dir: Path, server: int) -> None:
    os.kill(server, signal.SIGSTOP)
    assert stop_redis(data_dir, timeout=0.5)
    assert servers_in(data_dir) == []
    ensure_redis(data_dir)
    assert is_kept(data_dir)


@pytest.mark.parametrize("is_server", [False, True], ids=["another program", "a server in another directory"])
def test_whoever_holds_the_lock_and_is_no_server_is_not_killed_and_no_server_starts(
    data_dir: Path, is_server: bool
) -> None:
    home = data_dir / "redis"
    home.mkdir(mode=0o700)
    command = (
        [str(server_binary()), "--port", "0", "--unixsocket", "other.sock"] if is_server else ["/bin/sleep", "600"]
    )
    start_under_lock(home, *command, cwd=data_dir if is_server else None)
    holder = server_process(home)
    assert holder
    try:
        with pytest.raises(StoreUnavailable, match="cannot be ended"):
            ensure_redis(data_dir, silence_s=0.1)
        assert Path(psutil.Process(holder).exe()).name == Path(command[0]).resolve().name
    finally:
        os.kill(holder, signal.SIGKILL)


def test_a_second_server_cannot_be_launched_beside_the_first(data_dir: Path) -> None:
    home, pid = data_dir / "redis", ensure_redis(data_dir).pid
    start_under_lock(home, "/bin/sleep", "600")
    assert server_process(home) == pid
    assert servers_in(data_dir) == [pid]


@pytest.mark.slow
async def test_a_server_killed_while_its_child_rewrites_the_file_comes_back_at_once(data_dir: Path) -> None:
    """The child outlives the server, and must not hold its lock."""
    pid = ensure_redis(data_dir).pid
    keep_something(data_dir)
    with client_in(data_dir) as client:
        client.config_set("rdb-key-save-delay", 60_000_000)  # microseconds
        client.bgrewriteaof()
        await wait_until(lambda: len(servers_in(data_dir)) == 2)
    os.kill(pid, signal.SIGKILL)
    (child,) = set(servers_in(data_dir)) - {pid}
    assert ensure_redis(data_dir).pid not in (pid, child)
    assert psutil.pid_exists(child)
    assert is_kept(data_dir)


@pytest.mark.slow
def test_a_server_that_still_replays_its_file_is_not_killed(data_dir: Path) -> None:
    home = data_dir / "redis"
    ensure_redis(data_dir)
    keep_something(data_dir)
    with client_in(data_dir) as client, client.pipeline(transaction=False) as pipeline:
        for number in range(10_000):
            pipeline.set("busy", number)
        pipeline.execute()
    assert stop_redis(data_dir)
    own = {"port": "0", "unixsocket": f"{home}/redis.sock", "dir": str(home), "appendonly": "yes"}
    slow = {"key-load-delay": "250"}  # microseconds for each command
    words = [word for name, value in (own | slow).items() for word in (f"--{name}", value)]
    start_under_lock(home, str(server_binary()), *words)
    assert ensure_redis(data_dir, silence_s=1).pid == server_process(home)
    with client_in(data_dir) as client:
        assert client.info("persistence")["loading"] == 1
