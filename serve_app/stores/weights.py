"""Adapter weights: fetched once, checked, stored by digest on this machine."""

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from serve_app.atomic_files import atomic_file
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable, StoreUnavailable
from serve_app.safetensors_file import MAX_FILE_BYTES, UnusableFile
from serve_app.safetensors_sandbox import check_in_subprocess
from serve_app.settings import Settings
from serve_app.stores.lora_files import where_it_is
from serve_app.stores.storage import WEIGHTS, in_storage_thread
from serve_app.stores.weight_cache import WeightCache
from serve_app.stores.weight_files import MAX_CONFIG_BYTES, PEFT_CONFIG, opened, weight_files, weights_digest

log = logging.getLogger(__name__)

_BLOCK = 1 << 20
_passed: set[str] = set()
"""Digests of files that passed the check: in this process each is checked once."""


class _Identity(NamedTuple):
    """A file's identity, which changes when it is written or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Identity":
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class WeightStore:
    """Keeps weights in `data_dir/weights/<sha256>.safetensors` and folders `<sha256>/`, after every check.

    They stay within `weight_cache` bytes.

    Whether a file still is what it was is checked when this process first uses it, and when it has changed since.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = (settings.data_dir / "weights").resolve()
        self._cache = WeightCache(self._folder, limit=settings.weight_cache, reserve=settings.disk_reserve)
        self._storage, self._options = settings.storage, settings.storage_options
        self._digests: dict[Path, tuple[_Identity, str]] = {}

    def make_space(self) -> None:
        """Remove weights of this machine that are beyond the limit, or for which the disk is too full."""
        self._cache.make_space()

    async def fetch(self, adapter: Adapter) -> Path:
        """Return the adapter's weights as a local file or folder.

        Raises `AdapterUnavailable` when they are missing or refused.
        """
        stored = self._folder / (adapter.sha256 if adapter.is_folder else f"{adapter.sha256}.safetensors")
        paths = {name: stored / name for name in weight_files(adapter)}  # of a file, `stored / ""` is itself
        try:
            if not await in_storage_thread(lambda: self._is_intact(adapter, stored, paths), doing="adapter check"):
                await in_storage_thread(lambda: self._fetch(adapter, paths), doing="adapter download", pool=WEIGHTS)
        except FileNotFoundError as missing:
            raise AdapterUnavailable(f"the weights of {adapter.id} are not in storage") from missing
        except StoreUnavailable as outage:
            raise AdapterUnavailable(f"the weights of {adapter.id} cannot be fetched") from outage
        return stored

    def _is_intact(self, adapter: Adapter, stored: Path, paths: Mapping[str, Path]) -> bool:
        """Return whether the files are there with the catalog's digest.

        Each is read once per process and version of it.
        """
        self._cache.note_use(stored)  # before it is looked for, so that it is not removed meanwhile
        try:
            digest = weights_digest({name: self._digest(path) for name, path in paths.items()})
        except FileNotFoundError:
            return False
        if digest != adapter.sha256:
            log.warning("the stored weights of %s are not what they were: they are fetched again", adapter.id)
            return False
        return True

    def _digest(self, path: Path) -> str:
        with path.open("rb") as file:
            identity = _Identity.of(os.fstat(file.fileno()))
            known = self._digests.get(path)
            if known is None or known[0] != identity:
                known = self._digests[path] = identity, hashlib.file_digest(file, "sha256").hexdigest()
        return known[1]

    def _fetch(self, adapter: Adapter, paths: Mapping[str, Path]) -> None:
        """Fetch the files into the store; two fetchers at once write the same bytes."""
        self._cache.make_space(adapter.size_bytes)
        with ExitStack() as stack:
            drafts = {name: stack.enter_context(atomic_file(path)) for name, path in paths.items()}
            sources = weight_files(where_it_is(adapter, self._storage))
            digests = {name: self._copy(sources[name], draft, _limit(name)) for name, draft in drafts.items()}
            if weights_digest(digests) != adapter.sha256:
                raise AdapterUnavailable(f"the weights of {adapter.id} are not those of the catalog (sha256 differs)")
            for name, draft in drafts.items():
                if name != PEFT_CONFIG and digests[name] not in _passed:
                    draft.flush()
                    _check(Path(draft.name))
                    _passed.add(digests[name])

    def _copy(self, source: str, target: BinaryIO, limit: int) -> str:
        """Copy and digest in one pass; stop at the size limit, whatever size the storage reports."""
        digest, size = hashlib.sha256(), 0
        with opened(source, self._options) as read:
            _check_size(getattr(read, "size", None) or 0, limit)  # where the storage knows it, before a byte is copied
            while block := read.read(_BLOCK):
                size += len(block)
                _check_size(size, limit)
                digest.update(block)
                target.write(block)
        return digest.hexdigest()


def _check(path: Path) -> None:
    try:
        check_in_subprocess(path)
    except UnusableFile as error:
        raise AdapterUnavailable(f"adapter file: {error}") from error


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise AdapterUnavailable(f"the adapter file is larger than {'2 GiB' if limit == MAX_FILE_BYTES else '1 MiB'}")


def _limit(name: str) -> int:
    return MAX_CONFIG_BYTES if name == PEFT_CONFIG else MAX_FILE_BYTES
