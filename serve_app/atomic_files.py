"""Writes files whole or not at all, durably, and private by default."""

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""The mode of a file that only its owner may read."""
PRIVATE_FOLDER = 0o700
PRIVATE_UMASK = 0o077
"""Every process of ours sets this at its start, so that files of other libraries are private, too."""


@contextmanager
def atomic_file(
    path: Path, *, mode: int = PRIVATE, folder_mode: int = PRIVATE_FOLDER, overwrite: bool = True
) -> Generator[BinaryIO]:
    """Open a temporary file that takes the place of `path` when the block ends without an error.

    `file.name` is the temporary file's path, next to `path`. Readers see the old content or the new. Raises
    `FileExistsError` at the end when not to `overwrite`: of several writers the first wins. The folder is made if it is
    missing. Both have exactly the modes given, whatever the umask is.
    """
    make_folder(path.parent, folder_mode)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            os.fchmod(opened.fileno(), mode)
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            draft.replace(path)
        else:
            os.link(draft, path)
        _sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(
    path: Path, content: bytes | str, *, mode: int = PRIVATE, folder_mode: int = PRIVATE_FOLDER, overwrite: bool = True
) -> None:
    """Write a whole file through `atomic_file`."""
    with atomic_file(path, mode=mode, folder_mode=folder_mode, overwrite=overwrite) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path, mode: int = PRIVATE_FOLDER) -> None:
    """Make a folder and its missing parents with exactly this mode; leave an existing one as it is."""
    if path.is_dir():
        return
    make_folder(path.parent, mode)
    with suppress(FileExistsError):
        path.mkdir(mode=mode)
        path.chmod(mode)


def _sync_folder(folder: Path) -> None:
    """Flush the folder: without it a power cut may lose the file's name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
