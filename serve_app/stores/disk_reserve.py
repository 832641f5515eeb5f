"""Refuses new jobs before the disk of the embedded Redis or of local images is full."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from serve_app.domain.errors import StoreUnavailable
from serve_app.settings import Settings
from serve_app.stores.storage import in_storage_thread

CHECK_EVERY_S = 1.0


class Disk(NamedTuple):
    """A disk of this machine by the folder that the service fills, in bytes."""

    folder: Path
    free: int
    reserve: int


class DiskReserve:
    """Reports whether enough disk is free.

    It looks at most once a second, when asked; in between it answers from memory. Before it reports a short disk it calls
    each of `make_space` in turn until there is enough, in a thread.
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
        return await in_storage_thread(self._disks, doing="look at free space") if self._folders else []

    def _disks(self) -> list[Disk]:
        return [Disk(folder, free_bytes(folder), self._reserve) for folder in self._folders]

    def _short_for_good(self) -> Path | None:
        for make_space in self._make_space:
            if self._first_short() is None:
                return None
            make_space()
        return self._first_short()

    def _first_short(self) -> Path | None:
        return next((folder for folder in self._folders if free_bytes(folder) < self._reserve), None)


def local_folders(settings: Settings, storage_folder: Path | None) -> list[Path]:
    """List the folders that this service writes on its own machine: the embedded Redis's and the images'."""
    found: Iterable[Path | None] = (None if settings.redis_url else settings.data_dir.resolve(), storage_folder)
    return [folder for folder in found if folder is not None]


def free_bytes(folder: Path) -> int:
    """Return the bytes this user may still write in a folder, or where it will be made."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize
