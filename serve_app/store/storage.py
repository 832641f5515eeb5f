"""Storage by fsspec, called from asyncio with a time limit, and the disks that it and Redis may fill.

New jobs are refused before the disk of the embedded Redis or of local images is full.
"""

import asyncio
import importlib
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import fsspec

from serve_app.atomic_files import write_atomically
from serve_app.domain.errors import StoreUnavailable
from serve_app.settings import Settings
from serve_app.store.measures import CHECK_EVERY_S, MemoryReserve, RedisMemory

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""One call may take this long. A lease is 30 s and heartbeats go on meanwhile; a slower storage counts as down."""
THREADS = 8
"""Each pool has this many threads: blocked storage may delay images, never the event loop's default pool."""
STORAGE = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
WEIGHTS = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
"""Adapters are downloaded in these threads: where they come from may hang while images are stored and local files are
read."""
PROBES = ThreadPoolExecutor(1, thread_name_prefix="storage-probe")
"""Whether the storage can be written is tried in this thread, so that a try that hangs takes none from the others."""

_Answer = TypeVar("_Answer")


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of an fsspec URL and the URL's path in it. Untyped, as fsspec is."""
    return cast(tuple[Any, str], fsspec.core.url_to_fs(url, **options))


async def in_storage_thread(call: Callable[[], _Answer], *, doing: str, pool: ThreadPoolExecutor = STORAGE) -> _Answer:
    """Run a blocking storage call. Raises `FileNotFoundError`; any other failure is `StoreUnavailable`."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(pool, call)
    except FileNotFoundError:
        raise
    except storage_errors() as error:
        raise StoreUnavailable(f"the storage failed at {doing} ({type(error).__name__})") from error


@cache
def storage_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a storage that cannot serve: OSError, and those of the installed cloud libraries."""
    found: list[type[Exception]] = [OSError, TimeoutError]
    for module, names in (
        ("botocore.exceptions", ("BotoCoreError", "ClientError")),
        ("gcsfs.retry", ("HttpError",)),
        ("aiohttp", ("ClientError",)),
    ):
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        found += [getattr(library, name) for name in names]
    return tuple(found)


FINDINGS = "findings"
"""The folder of the storage where generators keep what they measured about exactness, and what they drew at a start."""


class StoredFiles:
    """Small files in a folder of the storage, for threads that cannot await it.

    `read` raises OSError after `TIMEOUT_S` at the latest; `write` returns at once, and a file that could not be stored
    is told in the log.
    """

    def __init__(self, settings: Settings, folder: str) -> None:
        self._files, root = open_filesystem(settings.storage, settings.storage_options)
        self._root = f"{root.rstrip('/')}/{folder}"

    def read(self, folder: str) -> Mapping[str, bytes]:
        """Return the files of a folder by their names; none where there is no such folder."""
        try:
            found = STORAGE.submit(self._read, f"{self._root}/{folder}").result(TIMEOUT_S)
        except storage_errors() as error:
            raise OSError(f"the storage failed at read ({type(error).__name__})") from error
        return {path.rpartition("/")[2]: content for path, content in found.items()}

    def _read(self, folder: str) -> dict[str, bytes]:
        paths = self._files.find(folder)
        return self._files.cat(paths, on_error="omit") if paths else {}

    def write(self, folder: str, name: str, content: bytes) -> None:
        STORAGE.submit(self._write, f"{self._root}/{folder}/{name}", content)

    def _write(self, path: str, content: bytes) -> None:
        try:
            if "file" in self._files.protocol:
                write_atomically(Path(path), content)
            else:
                self._files.pipe_file(path, content)
        except storage_errors() as error:
            log.warning("%s could not be stored (%s)", path, type(error).__name__)


OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits of everybody but a file's owner."""


def open_to_others(place: Path) -> list[Path]:
    """Name a file, or a folder and its entries, that other users may open: below a closed one nothing can be opened."""
    found: list[Path] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        if place.stat().st_mode & OTHERS:
            found.append(place)
            found += [
                path for path in sorted(place.iterdir()) if not path.is_symlink() and path.lstat().st_mode & OTHERS
            ]
    return found


class Disk(NamedTuple):
    """A disk of this machine by the folder that the service fills, in bytes."""

    folder: Path
    free: int
    reserve: int


class DiskReserve:
    """Reports whether enough disk is free.

    It looks at most once a second, when asked; in between it answers from memory. Before it reports a short disk it
    calls each of `make_space` in turn until there is enough, in a thread.
    """

    def __init__(self, settings: Settings, storage_folder: Path | None, *make_space: Callable[[], None]) -> None:
        self._folders = local_folders(settings, storage_folder)
        self._reserve = settings.disk_reserve
        self._make_space = make_space
        self._checked = -CHECK_EVERY_S
        self._short: Path | None = None

    async def check(self) -> None:
        """Raise `StoreUnavailable` while a disk has less free than the reserve."""
        if not self._folders or not self._reserve:
            return
        if time.monotonic() - self._checked >= CHECK_EVERY_S:
            self._checked = time.monotonic()  # whoever asks meanwhile gets the last answer
            self._short = await in_storage_thread(self._short_for_good, doing="look at free space")
        if self._short is not None:
            raise StoreUnavailable(f"the disk of {self._short} has less than {self._reserve} bytes free")

    async def disks(self) -> list[Disk]:
        """List the disks that this process looks at, as they are now."""

        def look() -> list[Disk]:
            return [Disk(folder, free_bytes(folder), self._reserve) for folder in self._folders]

        return await in_storage_thread(look, doing="look at free space")

    def _short_for_good(self) -> Path | None:
        for make_space in self._make_space:
            if self._first_short() is None:
                return None
            make_space()
        return self._first_short()

    def _first_short(self) -> Path | None:
        return next((folder for folder in self._folders if free_bytes(folder) < self._reserve), None)


class Space(NamedTuple):
    """Reports whether the disks and Redis have more left than their reserves."""

    disk: DiskReserve
    memory: MemoryReserve

    async def check(self) -> RedisMemory | None:
        """Return Redis's memory, if known.

        Raises `StoreUnavailable` while a disk or Redis has only its reserve left.
        """
        await self.disk.check()
        return await self.memory.check()


def local_folders(settings: Settings, storage_folder: Path | None) -> list[Path]:
    """List the folders that this service writes on its own machine: the embedded Redis's and the images'."""
    of_redis = None if settings.redis_url else settings.data_dir.resolve()
    return [folder for folder in (of_redis, storage_folder) if folder is not None]


def free_bytes(folder: Path) -> int:
    """Return the bytes this user may still write in a folder, or where it will be made."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize
