"""Permissions of the data directory, which its owner alone may read."""

import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OURS = (
    "images",
    "layer_tables",
    "redis",
    "weights",
    "first-image.png",
    "local.json",
    "secrets.json",
    "up.lock",
    "uploads",
)
"""What the service keeps in the data directory. Anything else there is somebody else's, and is left alone."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def close_to_others(data_dir: Path) -> None:
    """Make files of earlier versions unreadable for everybody but their owner.

    The directory itself keeps its mode if it was there before: an operator may have given one that holds other things.
    """
    for path in _open_entries(data_dir):
        if path.name in OURS:
            with suppress(PermissionError):  # another user's: the doctor names it
                path.chmod(stat.S_IMODE(path.lstat().st_mode) & ~OTHERS)


def open_to_others(data_dir: Path) -> list[Path]:
    """Name the entries of a folder, or the file, that other users may open."""
    try:
        is_open = bool(data_dir.stat().st_mode & OTHERS)
    except FileNotFoundError:
        return []
    return [data_dir, *_open_entries(data_dir)] if is_open else []


def _open_entries(data_dir: Path) -> Iterator[Path]:
    """The entries of the folder itself: below a closed folder nothing can be opened."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(data_dir.iterdir()):
            with suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if not stat.S_ISLNK(mode) and mode & OTHERS:
                    yield path
