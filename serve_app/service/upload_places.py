"""Gives uploads of LoRAs their places: a few of an account at once, each with a locked folder."""

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from serve_app.atomic_files import make_folder
from serve_app.domain.errors import TooManyUploads

log = logging.getLogger(__name__)

UPLOADS_AT_ONCE = 4
"""Of one account: slow uploads of many large files would take the disk, and their checks the places, from all others."""
SWEEP_EVERY_S = 5.0
"""How often each process looks for folders that no upload holds. One look lists a folder of a few names."""


class UploadPlaces:
    """Counts the uploads and fetches that have begun and are not registered yet, and holds their folders.

    A folder is locked by a descriptor that lives as long as its upload and dies with its process. One that nobody holds
    was left behind, and any process of this machine removes it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir.resolve() / "uploads"
        self._under_way: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, account_id: str) -> AsyncGenerator[AsyncExitStack]:
        """Hold a place; work that goes on afterwards keeps it by `pop_all`. Raises `TooManyUploads`."""
        if self._under_way[account_id] >= UPLOADS_AT_ONCE:
            raise TooManyUploads(f"Your account has {UPLOADS_AT_ONCE} uploads in progress; wait for one to finish.")
        self._under_way[account_id] += 1
        async with AsyncExitStack() as place:
            place.callback(self._leave, account_id)
            yield place

    @asynccontextmanager
    async def folder(self) -> AsyncGenerator[Path]:
        """Make a folder for an upload's files; its removal begins when the block ends, and no cancel stops it."""
        folder, lock = self._new_folder()
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, _remove, folder, lock))

    def sweep(self) -> None:
        """Remove the folders that no upload holds."""
        with suppress(OSError):  # there is none yet, or it is another user's
            for left in list(self._folder.iterdir()):
                with suppress(OSError):  # another process was first, or it is no folder
                    if (lock := _lock(left)) is not None:
                        _remove(left, lock)
                        log.info("removed %s, which an upload had left behind", left)

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.to_thread(self.sweep)
            await asyncio.sleep(SWEEP_EVERY_S)

    def _new_folder(self) -> tuple[Path, int]:
        """Return a new folder and the descriptor that locks it.

        It takes a few calls of the system, and no thread: a caller who is cancelled while one works would not know the
        folder that it makes.
        """
        make_folder(self._folder)
        while True:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            with suppress(FileNotFoundError):  # a sweep came between making and locking it
                if (lock := _lock(folder)) is not None:
                    if folder.exists():
                        return folder, lock
                    os.close(lock)

    def _leave(self, account_id: str) -> None:
        self._under_way[account_id] -= 1
        if not self._under_way[account_id]:
            del self._under_way[account_id]


def _lock(folder: Path) -> int | None:
    """Return a descriptor that locks the folder until it is closed; None while another does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: Path, lock: int) -> None:
    """Remove a folder; what a thread that was left alone writes to it meanwhile goes with the next sweep."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
