"""Bounds the adapter files of this machine: those that were used longest ago go first."""

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from serve_app.atomic_files import PRIVATE, make_folder
from serve_app.stores.disk_reserve import free_bytes

log = logging.getLogger(__name__)

KEPT_AFTER_USE = timedelta(minutes=10)
"""No file goes earlier: its runs may not have read it yet."""
NOTED_EVERY_S = 60.0
DRAFTS_LIVE = timedelta(days=1)
"""What a process that died while it wrote has left goes after this."""
_STORED = re.compile(r"[0-9a-f]{64}(\.safetensors)?")
_USES = ".used"


class _Entry(NamedTuple):
    used: float
    size: int
    path: Path


class WeightCache:
    """Removes files beyond `limit` bytes, or while the disk lacks `reserve` bytes.

    Several processes share the folder. When a file was last used is the time of an empty one beside it: its own times are part of its identity.
    """

    def __init__(self, folder: Path, *, limit: int, reserve: int) -> None:
        self._folder, self._uses = folder, folder / _USES
        self._limit, self._reserve = limit, reserve
        self._noted: dict[str, float] = {}

    def note_use(self, stored: Path) -> None:
        """Note that a file or folder, if it is there, is used now; at most once a minute."""
        now = time.monotonic()
        if now - self._noted.get(stored.name, -NOTED_EVERY_S) < NOTED_EVERY_S or not stored.exists():
            return
        with suppress(OSError):  # a full disk: what is there can be used
            make_folder(self._uses)
            (self._uses / stored.name).touch(PRIVATE)
            self._noted[stored.name] = now

    def make_space(self, incoming: int = 0) -> None:
        """Remove what was used longest ago until the rest, and so many bytes to come, are within the limits."""
        entries = sorted(self._entries())
        total = incoming + sum(entry.size for entry in entries)
        until = time.time() - KEPT_AFTER_USE.total_seconds()
        for entry in entries:
            if entry.used > until or (total <= self._limit and free_bytes(self._folder) - incoming >= self._reserve):
                return
            total -= entry.size
            with suppress(FileNotFoundError):  # another process removed it
                if self._last_use(entry.path) > entry.used:  # since the folder was listed, which may be a while ago
                    total += entry.size
                    continue
            self._remove(entry.path)
            log.info("removed %s from the weights of this machine: %d bytes", entry.path.name, entry.size)

    def _entries(self) -> Iterator[_Entry]:
        """The files and folders of weights; old drafts are removed on the way."""
        if not self._folder.exists():
            return
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                if _STORED.fullmatch(path.name):
                    yield _Entry(self._last_use(path), _size(path), path)
                elif path.name != _USES and path.stat().st_mtime < time.time() - DRAFTS_LIVE.total_seconds():
                    self._remove(path)

    def _last_use(self, path: Path) -> float:
        fetched = path.stat().st_mtime
        try:
            return max(fetched, (self._uses / path.name).stat().st_mtime)
        except FileNotFoundError:
            return fetched

    def _remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        (self._uses / path.name).unlink(missing_ok=True)
        self._noted.pop(path.name, None)


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(entry.stat().st_size for entry in os.scandir(path))
