"""Weight files, a safetensors file or a PEFT folder, in whichever storage they are: digests, versions, fetching."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

import fsspec

from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import InvalidParameter, PayloadTooLarge
from serve_app.settings import Settings
from serve_app.store.storage import open_filesystem

PEFT_CONFIG = "adapter_config.json"
PEFT_FILES = (PEFT_CONFIG, "adapter_model.safetensors")
"""Only these files of a folder count; others beside them are not read."""
MAX_CONFIG_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "generation")
"""Storages call a file's version by one of these names."""

log = logging.getLogger(__name__)


def weight_files(adapter: Adapter) -> Mapping[str, str]:
    """Return the URIs of the adapter's files by name: a folder's own names, '' for a file."""
    if not adapter.is_folder:
        return {"": adapter.file}
    return {name: f"{adapter.file.rstrip('/')}/{name}" for name in PEFT_FILES}


def weights_digest(digests: Mapping[str, str]) -> str:
    """Return the identity of weights from the SHA-256 of each file.

    A folder's is the SHA-256 of its lines `<digest>  <name>`, in this order.
    """
    if "" in digests:
        return digests[""]
    lines = "".join(f"{digests[name]}  {name}\n" for name in PEFT_FILES)
    return hashlib.sha256(lines.encode()).hexdigest()


@contextmanager
def opened(uri: str, options: Mapping[str, Any]) -> Generator[BufferedIOBase]:
    """Open a file of any storage for reading. Raises `OSError`."""
    with cast(Any, fsspec.open(uri, "rb", **_options_of(uri, options))) as file:
        yield file


def file_digest(uri: str, options: Mapping[str, Any]) -> str:
    with opened(uri, options) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_version(uri: str, options: Mapping[str, Any]) -> str | None:
    """Return what changes when the file does, its size with its time or entity tag; None if the storage has neither."""
    files, path = open_filesystem(uri, _options_of(uri, options))
    info: Mapping[str, Any] = files.info(path)
    marks: Sequence[str] = [str(info[name]) for name in _VERSIONS if info.get(name) is not None]
    return f"{info.get('size')} {marks[0]}" if marks else None


def _options_of(uri: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    return options if "://" in uri and not uri.startswith("file://") else {}


LIMIT_S = 60.0
"""All files of one source are read within this time; whatever takes longer is uploaded by its owner."""
FETCHES_AT_ONCE = 4
_NEVER = re.compile(r"::|[?#%\\\s]|(?:^|/)\.{1,2}(?:/|$)|//.*//")
"""No address holds a chain of file systems, a query, an escape, or a path that leads out of its folder."""
_pool = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="lora-source")


class LoraSources:
    """Fetches files below the operator's prefixes (`ATELIER_LORA_SOURCES`), and nothing else."""

    def __init__(self, settings: Settings) -> None:
        self._prefixes = settings.lora_sources
        self._largest = int(settings.max_lora_size)
        self._storage_scheme, self._storage_options = _scheme(settings.storage), settings.storage_options

    def check(self, source: str) -> None:
        """Check that an address is below one of the prefixes. Raises `InvalidParameter`."""
        if not self._prefixes:
            raise InvalidParameter("source: fetching is not enabled on this service; upload the file")
        below = any(source.startswith(prefix) and source != prefix for prefix in self._prefixes)
        if not below or _NEVER.search(source):
            raise InvalidParameter(f"source: must be a plain address below {' or '.join(self._prefixes)}")

    async def fetch(self, source: str, folder: Path, *, before_block: Callable[[], Awaitable[None]]) -> Path:
        """Copy the file, or the two files of a PEFT folder, to `folder`; return the file or `folder`.

        `source` ends with a `/` for a folder. `before_block` is called before each block is written. Raises
        `InvalidParameter`, `PayloadTooLarge`, and what `before_block` raises.
        """
        self.check(source)
        names = PEFT_FILES if source.endswith("/") else ("",)
        try:
            async with asyncio.timeout(LIMIT_S):
                for name in names:
                    limit = MAX_CONFIG_BYTES if name == PEFT_CONFIG else self._largest
                    await self._copy(source + name, folder / (name or "upload.safetensors"), limit, before_block)
        except TimeoutError:
            raise InvalidParameter(f"source: fetching it takes longer than {LIMIT_S:g} s; send the file") from None
        return folder if len(names) > 1 else folder / "upload.safetensors"

    async def _copy(self, uri: str, target: Path, limit: int, before_block: Callable[[], Awaitable[None]]) -> None:
        received = 0
        source = await _ask(uri, lambda: self._open(uri))
        try:
            await asyncio.to_thread(_append, target, b"")
            while block := await _ask(uri, lambda: source.read(BLOCK_BYTES)):
                received += len(block)
                if received > limit:
                    raise PayloadTooLarge(f"The source must be at most {limit} bytes.")
                await before_block()
                await asyncio.to_thread(_append, target, block)
        finally:
            _pool.submit(source.close)  # even this may take long where a storage no longer answers

    def _open(self, uri: str) -> Any:
        files, path = open_filesystem(uri, {**self._options(uri), "skip_instance_cache": True})
        return files.open(path, "rb")

    def _options(self, uri: str) -> Mapping[str, Any]:
        """Return the storage's options; redirects, which could lead anywhere, are not followed."""
        scheme = _scheme(uri)
        if scheme in ("http", "https"):
            return {"allow_redirects": False}
        return self._storage_options if scheme == self._storage_scheme else {}


async def _ask(uri: str, call: Callable[[], Any]) -> Any:
    """Make a blocking call of a storage's library; whatever it raises is an `InvalidParameter`."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_pool, call)
    except FileNotFoundError:
        raise InvalidParameter("source: there is no such file") from None
    except ImportError:
        raise InvalidParameter(f"source: this service has no library for {_scheme(uri)}://") from None
    except Exception as error:  # each storage library raises errors of its own
        log.warning("source %s cannot be read", uri, exc_info=error)
        raise InvalidParameter(f"source: it cannot be read ({type(error).__name__})") from None


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _append(target: Path, block: bytes) -> None:
    """Append to a file that the call itself opens: its thread goes on when the fetch is canceled."""
    with target.open("ab") as file:
        file.write(block)
