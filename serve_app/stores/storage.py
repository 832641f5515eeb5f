"""fsspec from asyncio: each call in a thread pool, with a time limit and one kind of outage."""

import asyncio
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar, cast

import fsspec

from serve_app.domain.errors import StoreUnavailable

TIMEOUT_S = 30.0
"""Of one call. A lease is 30 s and heartbeats go on meanwhile; a slower storage counts as down."""
THREADS = 8
"""Of each pool: blocked storage may delay images, never the event loop's default pool."""
STORAGE = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
WEIGHTS = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
"""For downloads of adapters: where they come from may hang while images are stored and local files are read."""

PROBES = ThreadPoolExecutor(1, thread_name_prefix="storage-probe")
"""For tries whether the storage can be written: one that hangs takes no thread from those who read and write."""

_Answer = TypeVar("_Answer")


def open_filesystem(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return the file system of an fsspec URL and the URL's path in it. Untyped, as fsspec is."""
    return cast(tuple[Any, str], fsspec.core.url_to_fs(url, **options))


async def in_storage_thread(call: Callable[[], _Answer], *, doing: str, pool: ThreadPoolExecutor = STORAGE) -> _Answer:
    """Run a blocking storage call. Raises `FileNotFoundError`; any other failure is `StoreUnavailable`."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(pool, call)
    except FileNotFoundError:
        raise
    except storage_errors() as error:
        raise StoreUnavailable(f"the storage failed at {doing} ({type(error).__name__})") from error


@cache
def storage_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a storage that cannot serve: OSError, and those of the installed cloud libraries."""
    found: list[type[Exception]] = [OSError, TimeoutError]
    for module, names in (
        ("botocore.exceptions", ("BotoCoreError", "ClientError")),
        ("gcsfs.retry", ("HttpError",)),
        ("aiohttp", ("ClientError",)),
    ):
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        found += [getattr(library, name) for name in names]
    return tuple(found)
