"""The embedded Redis: a real server for one machine, started on first use, never on the network.

Any process may call `ensure_redis` at any time; that is how the server is supervised. A file lock lets one caller start
it while the others wait and attach. Every write is on disk before it is acknowledged (`appendfsync always`), so a killed
server comes back with everything it had confirmed.
"""

import fcntl
import hashlib
import os
import stat
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from serve_app.atomic_files import PRIVATE, PRIVATE_FOLDER, PRIVATE_UMASK, make_folder
from serve_app.domain.errors import StoreUnavailable
from serve_app.stores.redis_binary import server_binary, version_of

SOCKET_PATH_LIMIT = 100
"""Bytes. `sun_path` holds 108 with its NUL; longer paths move the socket to a short private directory."""
PID_FILE = "redis.pid"
NEWER_FILES, NEWER_FILES_SINCE = "appendonlydir", (7,)
"""Where servers since Redis 7 keep the append-only file; they take over the one of older servers, which do not look there."""
COMPACT_HASHES = {"hash-max-ziplist-value": "4096"}
"""A job's record stays one list of bytes, in half the memory of a table, although its prompt has more than 64 bytes."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_SHARE, LEAST_MEMORY_BYTES = 0.25, 256 << 20
"""Of the machine's memory: the models need the rest. Full, new jobs are refused and running ones finish; without a bound
the kernel would end a process of its choice. The least holds 230,000 compact jobs."""
START_TIMEOUT_S = 60.0
"""Replaying an append-only file takes about 1 s per 100,000 jobs; a minute is far beyond any local queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedRedis:
    """A running server: where to connect, its process id, and which program it is."""

    url: str
    pid: int
    server: str
    version: str


def ensure_redis(data_dir: Path) -> EmbeddedRedis:
    """Return the server of `data_dir/redis`, started if it is not running.

    Raises `StoreUnavailable` with the end of the server's log when it does not come up.
    """
    home = _private_directory(data_dir.resolve() / "redis")
    socket = _socket_path(home)
    running = _running(socket)  # without the lock: the common case costs one round trip
    if running is not None:
        return running
    with _lock(home):
        running = _running(socket)
        if running is not None:
            return running
        _start(home, socket)
        return _wait_until_up(home, socket)


def memory_bound() -> int:
    """Return the server's memory limit in bytes, a part of this machine's or container's memory."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # `max` is no number: no limit
        has = min(has, int(CGROUP_LIMIT.read_text()))
    return max(LEAST_MEMORY_BYTES, int(has * MEMORY_SHARE))


def running_redis(data_dir: Path) -> EmbeddedRedis | None:
    """Return the server of `data_dir` if it is up; start nothing and make no directory."""
    home = data_dir.resolve() / "redis"
    return _running(_socket_path(home)) if home.is_dir() else None


def embedded_release(data_dir: Path) -> str:
    """Say which server is running: the system's own, or an older one from the packages."""
    running = running_redis(data_dir)
    return f"{running.server} {running.version}" if running else ""


def stop_redis(data_dir: Path, *, timeout: float = 10.0) -> bool:
    """Stop the server of `data_dir`, with everything on disk; False when none was running."""
    home = data_dir.resolve() / "redis"
    if not home.is_dir():
        return False
    socket = _socket_path(home)
    with _lock(home):
        running = _running(socket)
        if running is None:
            return False
        deadline = time.monotonic() + timeout
        while _is_alive(running.pid) and time.monotonic() < deadline:
            _ask_to_stop(socket)
            time.sleep(0.02)
        return not _is_alive(running.pid)


def _ask_to_stop(socket: Path) -> None:
    """Ask a server to shut down.

    A server that writes its first append-only file refuses until it has; one that is stopping may answer nothing.
    """
    with _client(socket) as client, suppress(redis.ResponseError, redis.ConnectionError, redis.TimeoutError):
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
def _lock(home: Path) -> Generator[None]:
    with os.fdopen(os.open(home / "lock", os.O_WRONLY | os.O_CREAT, PRIVATE), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _client(socket: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=5, retry=Retry(NoBackoff(), 0))


def _running(socket: Path) -> EmbeddedRedis | None:
    with _client(socket) as client:
        try:
            info: dict[str, str] = client.info("server")  # pyright: ignore[reportAssignmentType]
        except (redis.ConnectionError, redis.TimeoutError):
            return None
    server = "valkey" if "valkey_version" in info else "redis"
    version = info.get("valkey_version", info["redis_version"])
    return EmbeddedRedis(url=f"unix://{socket}", pid=int(info["process_id"]), server=server, version=version)


def _start(home: Path, socket: Path) -> None:
    binary = server_binary()
    if (home / NEWER_FILES).exists() and version_of(binary) < NEWER_FILES_SINCE:
        # it would not see them, and start with nothing
        raise StoreUnavailable(f"{home} was written by a newer server than {binary}: install Redis 7 or Valkey again")
    for left_by_a_killed_server in (socket, home / PID_FILE):
        left_by_a_killed_server.unlink(missing_ok=True)  # the lock says that nobody else is starting one
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
        "pidfile": str(home / PID_FILE),
        "logfile": str(home / "redis.log"),
        "daemonize": "yes",  # its own session, adopted by init: it outlives the worker that happened to start it
    }
    command = [str(binary), *(arg for name, value in options.items() for arg in (f"--{name}", value))]
    try:
        done = subprocess.run(
            command, umask=PRIVATE_UMASK, cwd=home, capture_output=True, text=True, timeout=START_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreUnavailable(f"the embedded Redis did not start: {error}") from error
    if done.returncode != 0:
        raise StoreUnavailable(f"the embedded Redis did not start: {(done.stdout + done.stderr).strip()[-300:]}")


def _wait_until_up(home: Path, socket: Path) -> EmbeddedRedis:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        running = _running(socket)
        if running is not None and _answers(socket):
            return running
        if running is None and _gave_up(home):
            break
        time.sleep(0.02)
    log = home / "redis.log"
    log_end = log.read_text(errors="replace").strip()[-300:] if log.exists() else "no log"
    raise StoreUnavailable(f"the embedded Redis did not come up in {home}: {log_end}")


def _answers(socket: Path) -> bool:
    """Return whether the server has replayed its append-only file."""
    with _client(socket) as client:
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


def _gave_up(home: Path) -> bool:
    pid_file = home / PID_FILE
    try:
        return not _is_alive(int(pid_file.read_text()))
    except (FileNotFoundError, ValueError):
        return False  # not written yet


def _is_alive(pid: int) -> bool:
    """Whether a process runs; False for a zombie, which in a container may never be collected."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # it ended just now, unless this system has no /proc
