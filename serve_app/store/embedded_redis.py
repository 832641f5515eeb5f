"""The embedded Redis: a real server for one machine, started on first use, never on the network.

Any process may call `ensure_redis` at any time; that is how the server is supervised. A file lock lets one caller start
it while the others wait and attach. Every write is on disk before it is acknowledged (`appendfsync always`), so a
killed server comes back with everything it had confirmed. No second server is ever started while one does not answer:
it is waited for, then killed, and replaced once it is dead (`redis_process.py`).

`python -m serve_app.store.embedded_redis DATA_DIR` stops the server when its standard input has ended, nobody uses the
server any more, and no `atelier up` holds the folder.
"""

import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from serve_app.atomic_files import PRIVATE, PRIVATE_FOLDER, PRIVATE_UMASK, make_folder
from serve_app.domain.errors import StoreUnavailable
from serve_app.store.locked_exec import locked_command
from serve_app.store.redis_inspection import release_of
from serve_app.store.redis_process import LOCK_FILE, end_server, server_binary, server_process, version_of

SOCKET_PATH_LIMIT = 100
"""A socket's path of more bytes moves to a short private directory: `sun_path` holds 108 with its NUL."""
LOG_FILE = "redis.log"
OLDER_FILE, NEWER_FILES, NEWER_FILES_SINCE = "appendonly.aof", "appendonlydir", (7,)
"""Servers since Redis 7 keep the append-only file in this folder, and take over the one of older servers, which do not
look there. A copy that is put back next to the folder would be passed over without a word."""
NEWEST_READ = b"REDIS0011"
"""The newest form of Redis's snapshots that Valkey reads begins with this: since 7.4 Redis writes another."""
COMPACT_HASHES = {"hash-max-ziplist-value": "4096"}
"""Records of LoRAs and accounts stay lists of bytes, in half the memory of a table, although a value has more than 64
bytes."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_SHARE, LEAST_MEMORY_BYTES = 0.25, 256 << 20
"""The server may take this share of the machine's memory; the models need the rest. When it is full, new jobs are
refused and running ones finish; without a bound the kernel would end a process of its choice. The least holds 220,000
completed jobs."""
START_TIMEOUT_S = 60.0
"""Replaying an append-only file takes about 1 s per 100,000 jobs; a minute is far beyond any local queue."""
TRY_S, ANSWER_LIMIT_S = 1.0, 5.0
"""How long one question to the server may take, and how many seconds of silence are an error for everybody but the
caller that waits for it: a crowded machine answers by then."""
SILENCE_LIMIT_S = 30.0
"""A disk that stalls or a machine that pauses is mostly back by then; a server that is not, is replaced."""
POLL_S = 0.02
QUIET_S, LEFT_TO_OTHERS_S = 1.0, 30.0
"""A server counts as unused when nobody was connected for the first time: a replica that still ends would start it
again. Whoever is still connected after the second belongs to another service. A server that is silent all that time
serves nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedRedis:
    """A running server: where to connect, its process id, and the name and version of its program."""

    url: str
    pid: int
    release: str


def ensure_redis(data_dir: Path, *, silence_s: float = SILENCE_LIMIT_S) -> EmbeddedRedis:
    """Return the server of `data_dir/redis`, started if there is none.

    One that does not answer is replaced after `silence_s` seconds. Raises `StoreUnavailable` with the end of the
    server's log when it does not come up, and within `ANSWER_LIMIT_S` when another caller already waits for a silent
    one.
    """
    home = _private_directory(data_dir.resolve() / "redis")
    socket = _socket_path(home)
    deadline = time.monotonic() + ANSWER_LIMIT_S
    while (running := _running(socket, min(silence_s, TRY_S))) is None:  # the common case takes no lock
        with _lock(home) as is_first:
            if is_first:
                return _revive(home, socket, silence_s)
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"the embedded Redis in {home} does not answer")
        time.sleep(POLL_S)
    return running


def memory_bound() -> int:
    """Return the server's memory limit in bytes, a part of this machine's or container's memory."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a cgroup without a limit says `max`, which is no number
        has = min(has, int(CGROUP_LIMIT.read_text()))
    return max(LEAST_MEMORY_BYTES, int(has * MEMORY_SHARE))


def running_redis(data_dir: Path) -> EmbeddedRedis | None:
    """Return the server of `data_dir`, or None without one; start nothing and make no directory.

    Raises `StoreUnavailable` when there is one that does not answer.
    """
    home = data_dir.resolve() / "redis"
    running = _running(_socket_path(home)) if home.is_dir() else None
    if running is None and (pid := server_process(home)) is not None:
        raise StoreUnavailable(f"the embedded Redis in {home} does not answer (process {pid})")
    return running


@contextmanager
def redis_left_as_it_was(data_dir: Path) -> Generator[None]:
    """Stop the server of `data_dir` at the end of the block if there was none at its beginning."""
    was_there = server_process(data_dir.resolve() / "redis") is not None
    try:
        yield
    finally:
        if not was_there:
            stop_redis(data_dir)


def stop_redis(data_dir: Path, *, timeout: float = 10.0) -> bool:
    """Stop the server of `data_dir`, with everything on disk.

    It is killed if it has not ended after `timeout` seconds. False when there was none, or when one is left: a stalled
    disk may hold a killed process.
    """
    home = data_dir.resolve() / "redis"
    if server_process(home) is None:
        return False
    deadline = time.monotonic() + timeout
    while server_process(home) is not None and (left := deadline - time.monotonic()) > 0:
        _ask_to_stop(_socket_path(home), min(left, ANSWER_LIMIT_S))
        time.sleep(POLL_S)
    return end_server(home)


def stop_redis_after_this_process(data_dir: Path) -> None:
    """Have the server stopped once this process has ended, however it ends, unless others go on using it."""
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(data_dir.resolve())],
        stdin=subprocess.PIPE,  # it is open as long as this process lives, and what that starts does not inherit it
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor the end of the terminal is for it
    )


def _main(data_dir: Path) -> None:
    sys.stdin.read()
    home = data_dir / "redis"
    began = quiet_since = time.monotonic()
    while server_process(home) is not None and time.monotonic() - quiet_since < QUIET_S:
        if (clients := _other_clients(home)) != 0:
            quiet_since = time.monotonic()
        if time.monotonic() - began > LEFT_TO_OTHERS_S:
            if clients:
                return
            break
        time.sleep(POLL_S)
    if not is_service_up(data_dir):  # while that starts, nobody is connected for seconds
        stop_redis(data_dir)


def is_service_up(data_dir: Path) -> bool:
    """Return whether `atelier up` runs on this data directory, where it holds a file lock."""
    try:
        with (data_dir / "up.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _other_clients(home: Path) -> int | None:
    """Return how many connections the server has besides this one; None while it does not answer."""
    with _client(_socket_path(home)) as client, suppress(redis.RedisError):
        return len(client.client_list()) - 1  # pyright: ignore[reportArgumentType]
    return None


def _ask_to_stop(socket: Path, timeout_s: float) -> None:
    """Ask a server to shut down.

    A server that writes its first append-only file refuses until it has; one that is stopping may answer nothing.
    """
    with _client(socket, timeout_s) as client, suppress(redis.RedisError):
        client.shutdown(nosave=True)  # nosave: the append-only file is the data


def _private_directory(path: Path) -> Path:
    make_folder(path)
    owner = path.lstat()
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid():
        raise StoreUnavailable(f"{path} must be a directory of this user")  # /tmp is shared: someone may be there first
    path.chmod(PRIVATE_FOLDER)
    return path


def _socket_path(home: Path) -> Path:
    wanted = home / "redis.sock"
    if len(os.fsencode(wanted)) <= SOCKET_PATH_LIMIT:
        return wanted
    place = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return _private_directory(Path("/tmp") / f"atelier-{os.getuid()}-{place}") / "redis.sock"


@contextmanager
def _lock(home: Path) -> Generator[bool]:
    """Let one caller at a time start the server; yield whether it is this one."""
    with _private_file(home / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _private_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE), "ab")


def _client(socket: Path, timeout_s: float = ANSWER_LIMIT_S) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))


def _running(socket: Path, timeout_s: float = ANSWER_LIMIT_S, *, has_replayed: bool = False) -> EmbeddedRedis | None:
    """Return the server that answers; with `has_replayed`, only once it has read its append-only file."""
    with _client(socket, timeout_s) as client:
        try:
            if has_replayed:
                client.ping()  # the server refuses it before
            info: dict[str, str] = client.info("server")  # pyright: ignore[reportAssignmentType]
        except redis.RedisError:
            return None
    return EmbeddedRedis(url=f"unix://{socket}", pid=int(info["process_id"]), release=release_of(info))


def _revive(home: Path, socket: Path, silence_s: float) -> EmbeddedRedis:
    """Wait for a server that does not answer; start one when there is none, or none any more."""
    deadline = time.monotonic() + silence_s
    while (pid := server_process(home)) is not None:
        running = _running(socket, min(silence_s, TRY_S))
        if running is not None:
            return running
        if time.monotonic() > deadline and not end_server(home):
            raise StoreUnavailable(f"the embedded Redis in {home} does not answer and cannot be ended (process {pid})")
        time.sleep(POLL_S)
    _start(home, socket)
    return _wait_until_up(home, socket)


def require_readable_files(home: Path, binary: Path) -> None:
    """Raise `StoreUnavailable` for a directory whose files this server cannot read, or would pass over."""
    if (home / NEWER_FILES).exists() and version_of(binary) < NEWER_FILES_SINCE:
        # an older server ignores these files and starts empty
        raise StoreUnavailable(f"{home} was written by a newer server than {binary}: install Redis 7 or Valkey again")
    if (home / NEWER_FILES / f"{OLDER_FILE}.manifest").exists() and (home / OLDER_FILE).exists():
        raise StoreUnavailable(
            f"{home} holds {OLDER_FILE} and {NEWER_FILES}, and a server reads only the latter: keep the one you mean"
        )
    for snapshot in (home / NEWER_FILES).glob("*.base.rdb") if binary.name.startswith("valkey") else ():
        with snapshot.open("rb") as file:
            mark = file.read(len(NEWEST_READ))
        if mark.startswith(b"REDIS") and mark > NEWEST_READ:
            raise StoreUnavailable(
                f"{home} was written by Redis 7.4 or newer, whose files Valkey does not read: start that Redis on it "
                "yourself and name it by --redis-url (docs/operate/upgrade.md)"
            )


def _start(home: Path, socket: Path) -> None:
    binary = server_binary()
    require_readable_files(home, binary)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "600",
        "dir": str(home),
        "appendonly": "yes",
        "appendfsync": "always",
        "no-appendfsync-on-rewrite": "no",
        "save": "",
        "maxmemory": str(memory_bound()),
        "maxmemory-policy": "noeviction",
        **COMPACT_HASHES,
        "logfile": str(home / LOG_FILE),
    }
    command = [str(binary), *(arg for name, value in options.items() for arg in (f"--{name}", value))]
    try:
        with _private_file(home / LOCK_FILE) as lock, _private_file(home / LOG_FILE) as log:
            subprocess.run(
                locked_command(lock.fileno(), command),
                umask=PRIVATE_UMASK,
                cwd=home,
                pass_fds=[lock.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # neither Ctrl-C nor the end of the terminal is for it
                timeout=START_TIMEOUT_S,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise StoreUnavailable(f"the embedded Redis did not start: {error}") from error


def _wait_until_up(home: Path, socket: Path) -> EmbeddedRedis:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server_process(home) is not None and time.monotonic() < deadline:
        running = _running(socket, has_replayed=True)
        if running is not None:
            return running
        time.sleep(POLL_S)
    log = home / LOG_FILE
    log_end = log.read_text(errors="replace").strip()[-300:] if log.exists() else "no log"
    raise StoreUnavailable(f"the embedded Redis did not come up in {home}: {log_end}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
