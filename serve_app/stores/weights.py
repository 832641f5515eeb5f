"""Adapter weights, fetched once, checked, and kept by digest on this machine."""

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, cast

import fsspec

from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable, StoreUnavailable
from serve_app.settings import Settings
from serve_app.stores.safetensors_check import MAX_FILE_BYTES, check_safetensors
from serve_app.stores.storage import in_storage_thread

_BLOCK = 1 << 20


class WeightStore:
    """Files of `data_dir/weights/<sha256>.safetensors`; one that is there has passed every check."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.data_dir / "weights"
        self._options = settings.storage_options

    async def fetch(self, adapter: Adapter) -> Path:
        """The adapter's weights as a local file. Raises `AdapterUnavailable` when they are missing or refused."""
        kept = (self._folder / f"{adapter.sha256}.safetensors").resolve()
        if kept.exists():
            return kept
        try:
            await in_storage_thread(lambda: self._fetch(adapter, kept), doing="adapter download")
        except FileNotFoundError as missing:
            raise AdapterUnavailable(f"the weights of {adapter.id} are not in storage") from missing
        except StoreUnavailable as outage:
            raise AdapterUnavailable(f"the weights of {adapter.id} cannot be fetched") from outage
        return kept

    def _fetch(self, adapter: Adapter, kept: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = kept.with_name(f".{kept.name}.{secrets.token_hex(4)}")
        try:
            if self._copy(adapter.file, draft) != adapter.sha256:
                raise AdapterUnavailable(f"the weights of {adapter.id} are not those of the catalog (sha256 differs)")
            check_safetensors(draft)
            draft.replace(kept)  # two fetchers at once both write the same bytes
        finally:
            draft.unlink(missing_ok=True)

    def _copy(self, source: str, target: Path) -> str:
        """Copy and digest in one pass; stop at the size limit, whatever the storage claims."""
        digest, size = hashlib.sha256(), 0
        options = self._options if "://" in source and not source.startswith("file://") else {}
        with cast(Any, fsspec.open(source, "rb", **options)) as read, target.open("wb") as write:
            _check_size(getattr(read, "size", None) or 0)  # where the storage tells it, before a byte is copied
            while block := read.read(_BLOCK):
                size += len(block)
                _check_size(size)
                digest.update(block)
                write.write(block)
            write.flush()
            os.fsync(write.fileno())
        return digest.hexdigest()


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise AdapterUnavailable("the adapter file is larger than 2 GiB")
