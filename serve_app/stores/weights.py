"""Adapter weights: fetched once, checked, stored by digest on this machine."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec

from serve_app.atomic_files import atomic_file
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable, StoreUnavailable
from serve_app.safetensors_file import MAX_FILE_BYTES, UnusableFile, check_safetensors
from serve_app.settings import Settings
from serve_app.stores.storage import in_storage_thread

log = logging.getLogger(__name__)

_BLOCK = 1 << 20


class _Identity(NamedTuple):
    """What changes when a file is written or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Identity":
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class WeightStore:
    """Files of `data_dir/weights/<sha256>.safetensors`; one that is there has passed every check.

    Whether it still is what it was is checked when this process first uses it, and when it has changed since.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.data_dir / "weights"
        self._options = settings.storage_options
        self._verified: dict[Path, _Identity] = {}

    async def fetch(self, adapter: Adapter) -> Path:
        """Return the adapter's weights as a local file. Raises `AdapterUnavailable` when missing or refused."""
        stored = (self._folder / f"{adapter.sha256}.safetensors").resolve()
        try:
            if await in_storage_thread(lambda: self._is_intact(adapter, stored), doing="adapter check"):
                return stored
            await in_storage_thread(lambda: self._fetch(adapter, stored), doing="adapter download")
        except FileNotFoundError as missing:
            raise AdapterUnavailable(f"the weights of {adapter.id} are not in storage") from missing
        except StoreUnavailable as outage:
            raise AdapterUnavailable(f"the weights of {adapter.id} cannot be fetched") from outage
        return stored

    def _is_intact(self, adapter: Adapter, stored: Path) -> bool:
        """Whether the file is there with the catalog's digest; read once per process and version of the file."""
        try:
            with stored.open("rb") as file:
                identity = _Identity.of(os.fstat(file.fileno()))
                if self._verified.get(stored) == identity:
                    return True
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return False
        if digest != adapter.sha256:
            log.warning("the stored weights of %s are not what they were: they are fetched again", adapter.id)
            return False
        self._verified[stored] = identity
        return True

    def _fetch(self, adapter: Adapter, stored: Path) -> None:
        with atomic_file(stored) as draft:  # two fetchers at once both write the same bytes
            if self._copy(adapter.file, draft) != adapter.sha256:
                raise AdapterUnavailable(f"the weights of {adapter.id} are not those of the catalog (sha256 differs)")
            draft.flush()
            _check(Path(draft.name))

    def _copy(self, source: str, target: BinaryIO) -> str:
        """Copy and digest in one pass; stop at the size limit, whatever size the storage reports."""
        digest, size = hashlib.sha256(), 0
        options = self._options if "://" in source and not source.startswith("file://") else {}
        with cast(Any, fsspec.open(source, "rb", **options)) as read:
            _check_size(getattr(read, "size", None) or 0)  # where the storage knows it, before a byte is copied
            while block := read.read(_BLOCK):
                size += len(block)
                _check_size(size)
                digest.update(block)
                target.write(block)
        return digest.hexdigest()


def _check(path: Path) -> None:
    try:
        check_safetensors(path)
    except UnusableFile as error:
        raise AdapterUnavailable(f"adapter file: {error}") from error


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise AdapterUnavailable("the adapter file is larger than 2 GiB")
