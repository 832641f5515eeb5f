"""Adapter weights: fetched once, checked, stored by digest on this machine."""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from serve_app.atomic_files import atomic_file
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable, StoreUnavailable
from serve_app.safetensors_file import MAX_FILE_BYTES, UnusableFile, check_safetensors
from serve_app.settings import Settings
from serve_app.stores.storage import in_storage_thread

_BLOCK = 1 << 20


class WeightStore:
    """Files of `data_dir/weights/<sha256>.safetensors`; one that is there has passed every check."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.data_dir / "weights"
        self._options = settings.storage_options

    async def fetch(self, adapter: Adapter) -> Path:
        """Return the adapter's weights as a local file. Raises `AdapterUnavailable` when missing or refused."""
        stored = (self._folder / f"{adapter.sha256}.safetensors").resolve()
        if stored.exists():
            return stored
        try:
            await in_storage_thread(lambda: self._fetch(adapter, stored), doing="adapter download")
        except FileNotFoundError as missing:
            raise AdapterUnavailable(f"the weights of {adapter.id} are not in storage") from missing
        except StoreUnavailable as outage:
            raise AdapterUnavailable(f"the weights of {adapter.id} cannot be fetched") from outage
        return stored

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
