"""Adapter weights on this machine: fetched once, checked, kept by digest; those used longest ago go first."""

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, NamedTuple

from serve_app.atomic_files import PRIVATE, atomic_file, make_folder
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable, StoreUnavailable
from serve_app.loras.sources import BLOCK_BYTES, MAX_CONFIG_BYTES, PEFT_CONFIG, opened, weight_files, weights_digest
from serve_app.loras.stored_weights import where_it_is
from serve_app.safetensors_file import MAX_FILE_BYTES, UnusableFile, check_in_subprocess
from serve_app.settings import Settings
from serve_app.store.storage import WEIGHTS, free_bytes, in_storage_thread

LAYER_TABLES = "layer_tables"
"""The folder of the data directory with what adapters are checked against, made from each base model's
configuration."""

log = logging.getLogger(__name__)

KEPT_AFTER_USE = timedelta(minutes=10)
"""No file is removed earlier after its last use: its runs may not have read it yet."""
NOTED_EVERY_S = 60.0
DRAFTS_LIVE = timedelta(days=1)
"""Drafts that a process left when it died while it wrote are removed after this time."""
_STORED = re.compile(r"[0-9a-f]{64}(\.safetensors)?")
_USES = ".used"


class _Entry(NamedTuple):
    used: float
    size: int
    path: Path


class WeightCache:
    """Removes files beyond `limit` bytes, or while the disk lacks `reserve` bytes.

    Several processes share the folder. The time of an empty file in a folder next to it says when a file was last used,
    since its own times are part of its identity.
    """

    def __init__(self, folder: Path, *, limit: int, reserve: int) -> None:
        self._folder, self._uses = folder, folder / _USES
        self._limit, self._reserve = limit, reserve
        self._noted: dict[str, float] = {}

    def note_use(self, stored: Path) -> None:
        """Record that a file or folder was used now, if it exists; at most once a minute."""
        now = time.monotonic()
        if now - self._noted.get(stored.name, -NOTED_EVERY_S) < NOTED_EVERY_S or not stored.exists():
            return
        with suppress(OSError):  # on a full disk, what is there can be used
            make_folder(self._uses)
            (self._uses / stored.name).touch(PRIVATE)
            self._noted[stored.name] = now

    def make_space(self, incoming: int = 0) -> None:
        """Remove what was used longest ago until the rest and `incoming` bytes are within the limits."""
        entries = sorted(self._entries())
        total = incoming + sum(entry.size for entry in entries)
        until = time.time() - KEPT_AFTER_USE.total_seconds()
        for entry in entries:
            if entry.used > until or (total <= self._limit and free_bytes(self._folder) - incoming >= self._reserve):
                return
            total -= entry.size
            with suppress(FileNotFoundError):  # another process removed it
                if self._last_use(entry.path) > entry.used:  # it was used since the folder was listed
                    total += entry.size
                    continue
            self._remove(entry.path)
            log.info("removed %s from the weights of this machine: %d bytes", entry.path.name, entry.size)

    def _entries(self) -> Iterator[_Entry]:
        """Yield the files and folders of weights; old drafts are removed on the way."""
        if not self._folder.exists():
            return
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                if _STORED.fullmatch(path.name):
                    files = path.iterdir() if path.is_dir() else [path]
                    yield _Entry(self._last_use(path), sum(file.stat().st_size for file in files), path)
                elif path.name != _USES and path.stat().st_mtime < time.time() - DRAFTS_LIVE.total_seconds():
                    self._remove(path)

    def _last_use(self, path: Path) -> float:
        fetched = path.stat().st_mtime
        try:
            return max(fetched, (self._uses / path.name).stat().st_mtime)
        except FileNotFoundError:
            return fetched

    def _remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        (self._uses / path.name).unlink(missing_ok=True)
        self._noted.pop(path.name, None)


_passed: set[str] = set()
"""Files with these digests passed the check: in this process each is checked once."""


class WeightStore:
    """Keeps weights in `data_dir/weights/<sha256>.safetensors` and folders `<sha256>/`, within `weight_cache` bytes.

    Whether a file still is what it was is checked when this process first uses it, and when it has changed since.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = (settings.data_dir / "weights").resolve()
        self._cache = WeightCache(self._folder, limit=settings.weight_cache, reserve=settings.disk_reserve)
        self._storage, self._options = settings.storage, settings.storage_options
        self._digests: dict[Path, tuple[tuple[int, ...], str]] = {}
        """The digest of each file, and what changes when it is written or replaced."""

    def make_space(self) -> None:
        """Remove weights of this machine that are beyond the limit, or for which the disk is too full."""
        self._cache.make_space()

    async def fetch(self, adapter: Adapter) -> Path:
        """Return the adapter's weights as a local file or folder.

        Raises `AdapterUnavailable` when they are missing or refused.
        """
        stored = self._folder / (adapter.sha256 if adapter.is_folder else f"{adapter.sha256}.safetensors")
        paths = {name: stored / name for name in weight_files(adapter)}  # `stored / ""` is a single file
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
        self._cache.note_use(stored)  # noted before the look, so that it is not removed meanwhile
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
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
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
                    try:
                        check_in_subprocess(Path(draft.name))
                    except UnusableFile as error:
                        raise AdapterUnavailable(f"adapter file: {error}") from error
                    _passed.add(digests[name])

    def _copy(self, source: str, target: BinaryIO, limit: int) -> str:
        """Copy and digest in one pass; stop at the size limit, whatever size the storage reports."""
        digest, size = hashlib.sha256(), 0
        with opened(source, self._options) as read:
            _check_size(getattr(read, "size", None) or 0, limit)  # where the storage knows it, before a byte is copied
            while block := read.read(BLOCK_BYTES):
                size += len(block)
                _check_size(size, limit)
                digest.update(block)
                target.write(block)
        return digest.hexdigest()


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise AdapterUnavailable(f"the adapter file is larger than {'2 GiB' if limit == MAX_FILE_BYTES else '1 MiB'}")


def _limit(name: str) -> int:
    return MAX_CONFIG_BYTES if name == PEFT_CONFIG else MAX_FILE_BYTES
