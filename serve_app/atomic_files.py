"""Files that are written whole or not at all, and survive a power cut."""

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""Mode of a file that only its owner may read."""


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o666, overwrite: bool = True) -> Generator[BinaryIO]:
    """A temporary file beside `path` (`file.name` is its path) that takes its place when the block ends without an error.

    Readers see the old content or the new. Raises `FileExistsError` at the end when not to `overwrite`: of several writers
    the first wins. The folder is made if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.close(descriptor)
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


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o666, overwrite: bool = True) -> None:
    """Write a whole file through `atomic_file`."""
    with atomic_file(path, mode=mode, overwrite=overwrite) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _sync_folder(folder: Path) -> None:
    """Without it a power cut may lose the file's name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
