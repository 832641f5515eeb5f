"""Uploads: a form whose files are read while they are sent, again for each try, and the bar of a LoRA's."""

import hashlib
import io
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from serve_app.client.display import shown_bar

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CHECK_S = 180.0
"""An upload's answer may take this long: the service first checks the file, for two minutes at most, and others before
it."""

CONNECT_S = 5.0
Timeout = float | timedelta | httpx.Timeout | None
TIMEOUT = httpx.Timeout(30.0, connect=CONNECT_S)

OnSent = Callable[[int, int], object]
"""A callback that is given the bytes sent and the bytes in all, from 0 again when a try is repeated."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Text fields, and files by field, on disk or in memory; `on_progress` sees the bytes of those on disk."""

    fields: Mapping[str, str]
    files: Mapping[str, Path | bytes]
    on_progress: OnSent | None = None


def lora_files(path: Path) -> dict[str, Path]:
    """A safetensors file, or the two files of a folder as PEFT saves one. Raises `FileNotFoundError`."""
    files = {"file": path / PEFT_WEIGHTS, "adapter_config": path / PEFT_CONFIG} if path.is_dir() else {"file": path}
    for file in files.values():
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
    return files


def weights_sha256(files: Mapping[str, Path]) -> str:
    """Return the digest by which the service knows weights.

    A file has its own digest, and a folder that of both files' lines `<digest>  <name>`.
    """
    digests: dict[str, str] = {}
    for field, path in files.items():
        with path.open("rb") as file:
            digests[field] = hashlib.file_digest(file, "sha256").hexdigest()
    if "adapter_config" not in digests:
        return digests["file"]
    lines = f"{digests['adapter_config']}  {PEFT_CONFIG}\n{digests['file']}  {PEFT_WEIGHTS}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


@contextmanager
def sent_body(upload: Upload | None) -> Generator[dict[str, Any]]:
    """Arguments of httpx's `request` that send the form; the files are open meanwhile."""
    if upload is None:
        yield {}
        return
    on_disk = {name: file for name, file in upload.files.items() if isinstance(file, Path)}
    in_memory = {name: (name, file) for name, file in upload.files.items() if isinstance(file, bytes)}
    total, sent = sum(file.stat().st_size for file in on_disk.values()), 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        if upload.on_progress is not None and size:
            upload.on_progress(sent, total)

    with ExitStack() as opened:
        files = {name: opened.enter_context(_CountedFile(path, count)) for name, path in on_disk.items()}
        named = {name: (file.shown_name, file) for name, file in files.items()}
        yield {"data": dict(upload.fields), "files": {**named, **in_memory}}


def read_timeout(timeout: Timeout) -> httpx.Timeout:
    """Return how long the parts of a call may take, connecting at most `CONNECT_S`."""
    if isinstance(timeout, httpx.Timeout):
        return timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return httpx.Timeout(seconds, connect=CONNECT_S if seconds is None else min(seconds, CONNECT_S))


def timeout_of(least: float | None, most: float | None, timeout: httpx.Timeout) -> httpx.Timeout:
    """The client's own, with at least `least` and at most `most` seconds for an answer."""
    read = timeout.read
    if least is not None and read is not None:
        read = max(read, least)
    if most is not None:
        read = most if read is None else min(read, most)
    return httpx.Timeout(connect=timeout.connect, read=read, write=timeout.write, pool=timeout.pool)


class _CountedFile(io.FileIO):
    """A file that tells how much of it was read."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path)
        self.shown_name = path.name
        self._count = count

    def read(self, size: int | None = -1, /) -> bytes:
        block = super().read(-1 if size is None else size)
        self._count(len(block))
        return block


@contextmanager
def upload_progress(label: str, on_progress: OnSent | None, *, shows_bar: bool) -> Generator[OnSent | None]:
    """Yield what is called with the bytes sent: `on_progress`, or a bar, which then says that the file is checked.

    Raises `ValueError` for both.
    """
    if not shows_bar:
        yield on_progress
        return
    if on_progress is not None:
        raise ValueError("progress: give either progress or on_progress")
    with shown_bar(f"Uploading {label}") as show:

        def sent(done: int, total: int) -> None:
            if show is not None:
                show(f"{'Checking' if done >= total else 'Uploading'} {label}", done / total)

        yield sent
