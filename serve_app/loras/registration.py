"""Registers a LoRA: checks it in a process of its own, stores it by digest, and offers it everywhere.

Until then an upload has a place: a few of an account at once, each with a locked folder.
"""

import asyncio
import fcntl
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.accounts.api_keys import base32
from serve_app.atomic_files import make_folder
from serve_app.domain.catalog import Adapter, BaseModel, Offer, Terms
from serve_app.domain.digests import Digests
from serve_app.domain.durations import epoch_ms, from_epoch_ms
from serve_app.domain.errors import (
    IdempotencyConflict,
    InvalidParameter,
    LoraQuotaExceeded,
    NotFound,
    StoreUnavailable,
    TooManyUploads,
)
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import AdapterRegistry, CatalogReader
from serve_app.loras.catalog_file import add_digests
from serve_app.loras.sources import weight_files
from serve_app.loras.stored_weights import LoraWeights
from serve_app.loras.weights import LAYER_TABLES
from serve_app.settings import Settings
from serve_app.store.limited_process import read_in_process

log = logging.getLogger(__name__)

UPLOADS_AT_ONCE = 4
"""One account has at most this many uploads at once: slow ones of large files would take disk and checks from all
others."""
SWEEP_EVERY_S = 5.0
"""How often each process looks for folders that no upload holds. One look lists a folder of a few names."""


class UploadPlaces:
    """Counts the uploads and fetches that have begun and are not registered yet, and holds their folders.

    A folder is locked by a descriptor that lives as long as its upload and dies with its process. One that nobody holds
    was left behind, and any process of this machine removes it.
    """

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir.resolve() / "uploads"
        self._under_way: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, account_id: str) -> AsyncGenerator[AsyncExitStack]:
        """Hold a place; work that goes on afterwards keeps it by `pop_all`. Raises `TooManyUploads`."""
        if self._under_way[account_id] >= UPLOADS_AT_ONCE:
            raise TooManyUploads(f"Your account has {UPLOADS_AT_ONCE} uploads in progress; wait for one to finish.")
        self._under_way[account_id] += 1
        async with AsyncExitStack() as place:
            place.callback(self._under_way.subtract, [account_id])
            yield place

    @asynccontextmanager
    async def folder(self) -> AsyncGenerator[Path]:
        """Make a folder for an upload's files; its removal begins when the block ends, and no cancel stops it."""
        made = asyncio.get_running_loop().run_in_executor(None, self._new_folder)
        try:
            yield (await asyncio.shield(made))[0]
        finally:
            await asyncio.shield(_remove_made(made))

    def sweep(self) -> None:
        """Remove the folders that no upload holds."""
        with suppress(OSError):  # the folder is not there yet, or is another user's
            for left in list(self._folder.iterdir()):
                with suppress(OSError):  # another process was first, or it is no folder
                    if (lock := _lock(left)) is not None:
                        _remove(left, lock)
                        log.info("removed %s, which an upload had left behind", left)

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.to_thread(self.sweep)
            await asyncio.sleep(SWEEP_EVERY_S)

    def _new_folder(self) -> tuple[Path, int]:
        """Return a new folder and the descriptor that locks it."""
        make_folder(self._folder)
        while True:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            with suppress(FileNotFoundError):  # a sweep came between making and locking it
                if (lock := _lock(folder)) is not None:
                    if folder.exists():
                        return folder, lock
                    os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that locks the folder until it is closed; None while another does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


async def _remove_made(made: asyncio.Future[tuple[Path, int]]) -> None:
    """Remove a folder once it is made, for a caller who may have been canceled before."""
    await asyncio.to_thread(_remove, *await made)


def _remove(folder: Path, lock: int) -> None:
    """Remove a folder; what a thread that was left alone writes to it meanwhile goes with the next sweep."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


class Registered(NamedTuple):
    """An adapter, and how it was registered.

    `added` now; `replayed`, by an earlier call with the same key and body; `same`, the owner had its weights before.
    """

    adapter: Adapter
    status: str


INSPECTIONS_AT_ONCE = 2
INSPECTION_LIMIT_S = 120.0
"""The inspection of one file may take this long; a base model's first takes 8 s, every other 2 s, and both more on a
busy machine."""
PROCESSOR_LIMIT_S = 30
"""Each of the two reads of a file, of its names and of its numbers, may take this much processor time, so that two
endless files hold both places no longer than twice that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraRegistration:
    settings: Settings
    applied_catalog: AppliedCatalog
    catalog: CatalogReader
    registry: AdapterRegistry
    weights: LoraWeights
    draw_later: Callable[[str], Awaitable[None]]
    """Has a sample of the LoRA with this id drawn when there is nothing else to do."""
    max_rank: int = DEFAULT_MAX_RANK
    """The highest rank that a LoRA may have, which is what the generators take."""
    inspections: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(INSPECTIONS_AT_ONCE))
    """Places for processes that read customers' files, each with limits of its own."""

    async def register(
        self,
        path: Path,
        offer: Offer,
        *,
        owner: str = "",
        accounts: frozenset[str] | None = frozenset(),
        terms: Terms | None = None,
    ) -> Registered:
        """Register the file, or folder of PEFT, at `path`.

        An owner who registers by itself is held to `terms`. Raises `InvalidParameter` with the reason,
        `StoreUnavailable`; under terms `IdempotencyConflict`, `LoraQuotaExceeded`.
        """
        path = await asyncio.to_thread(path.resolve)
        bases = await self.applied_catalog.base_models()
        base = next((base for base in bases if base.id == offer.base_model), None)
        if base is None:
            raise InvalidParameter(f"base_model: there is no base model {offer.base_model!r}")
        adapter = await _digested(path, offer, owner, accounts)
        if terms is not None:
            before = json.dumps([asdict(offer), adapter.sha256], sort_keys=True)
            terms = replace(terms, body=Digests.of([offer, adapter.sha256], before))
            answer = await self._register(adapter, terms, asks=True)
            if answer.status != "added":  # the file need not be read, which takes seconds
                return answer
        async with self.inspections:
            found = await _inspect(base, path, self.max_rank, self.settings.data_dir.resolve() / LAYER_TABLES)
        parts, files = {part: Path(uri) for part, uri in weight_files(adapter).items()}, self.weights.files
        async with self.weights.held(files.uri(adapter.sha256, parts)):
            adapter = replace(adapter, file=await files.put(adapter.sha256, parts), found=found)
            registered = await self._register(adapter, terms)
        if registered.status == "added":
            with suppress(StoreUnavailable):
                await self.ask_for_sample(registered.adapter)
        return registered

    async def ask_for_sample(self, adapter: Adapter) -> None:
        """Have a sample of an account's LoRA drawn later, unless the operator has switched samples off."""
        if adapter.owner and self.settings.lora_samples:
            await self.draw_later(adapter.id)

    async def _register(self, adapter: Adapter, terms: Terms | None, *, asks: bool = False) -> Registered:
        """Register the adapter, or ask whether it would be; return what the owner has already, if that is it."""
        status, lora_id = await self.registry.register(adapter, terms, asks=asks)
        if status == "added":
            return Registered(adapter, "added")
        if status in ("replayed", "same"):
            there = await self.catalog.adapter(lora_id)
            if there is None:
                raise NotFound("The LoRA was removed meanwhile.")
            return Registered(there, status)
        if status == "conflict":
            raise IdempotencyConflict("This Idempotency-Key was used before with another body.")
        assert terms is not None, status
        if status == "too_many":
            raise LoraQuotaExceeded(f"Your plan allows {terms.max_loras} LoRAs of your own; delete one first.")
        raise LoraQuotaExceeded(f"Your plan allows {terms.max_bytes} bytes of LoRAs of your own; delete one first.")


async def remove_lora(registry: AdapterRegistry, weights: LoraWeights, lora_id: str) -> str:
    """Remove a registered LoRA, and its weights unless another has them. Returns `removed`, `unknown` or `file`."""
    removal = await registry.remove(lora_id)
    if removal.weights:
        await weights.remove_unused()
    return removal.status


async def _digested(path: Path, offer: Offer, owner: str, accounts: frozenset[str] | None) -> Adapter:
    """Return the adapter's record without its place in the storage and the facts of its file."""
    adapter = Adapter(
        id="model_" + base32(secrets.token_bytes(16)),
        **asdict(offer),
        created_at=from_epoch_ms(epoch_ms(datetime.now(UTC))),  # a record keeps times in milliseconds
        file=str(path),
        is_folder=await asyncio.to_thread(path.is_dir),
        sha256="",
        accounts=accounts,
        owner=owner,
    )
    digested = await asyncio.to_thread(add_digests, [adapter], {}, {})
    if digested.set_aside:
        raise InvalidParameter(f"file: {digested.set_aside[0].reason}")
    (adapter,) = digested.adapters
    files = map(Path, weight_files(adapter).values())
    return replace(adapter, size_bytes=await asyncio.to_thread(lambda: sum(file.stat().st_size for file in files)))


async def _inspect(base: BaseModel, path: Path, max_rank: int, tables: Path) -> Mapping[str, Any]:
    """Return what the file holds. Raises `InvalidParameter` where it does not fit the base model or breaks a limit."""
    arguments = (base.config or base.source, base.id, path, max_rank, tables, PROCESSOR_LIMIT_S)
    answer = await read_in_process(
        "serve_app.engine.inspection", *arguments,
        kind="a LoRA", seconds=INSPECTION_LIMIT_S, processor_seconds=PROCESSOR_LIMIT_S,
    )  # fmt: skip
    return answer["found"]
