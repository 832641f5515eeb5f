"""Stores weights of registered LoRAs in object storage by digest, so that equal ones are there once.

They are removed when no LoRA has them any more and no registration is about to need them.
"""

import asyncio
import logging
import secrets
import shutil
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from serve_app.atomic_files import atomic_file
from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import milliseconds
from serve_app.domain.errors import StoreUnavailable
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script
from serve_app.store.storage import in_storage_thread, open_filesystem

_log = logging.getLogger(__name__)

LORAS = "loras"


class LoraFiles:
    """`<storage>/loras/<sha256>.safetensors`, and `<storage>/loras/<sha256>/` for a folder of PEFT."""

    def __init__(self, settings: Settings) -> None:
        self._storage = settings.storage.rstrip("/")
        self._files, root = open_filesystem(settings.storage, settings.storage_options)
        self._root = root.rstrip("/")
        self._is_local = "file" in self._files.protocol

    def uri(self, sha256: str, files: Iterable[str]) -> str:
        """Return the address at which `put` stores files of these names."""
        return f"{self._storage}/{_name(sha256, is_folder='' not in files)}"

    async def put(self, sha256: str, files: Mapping[str, Path]) -> str:
        """Store the files by name, '' for a single one, and return the URI of the file or folder.

        Raises `StoreUnavailable`.
        """
        name = _name(sha256, is_folder="" not in files)
        for part, source in files.items():
            path = f"{self._root}/{name}/{part}".rstrip("/")
            await in_storage_thread(lambda source=source, path=path: self._write(source, path), doing="write")
        return self.uri(sha256, files)

    async def exists(self, uri: str) -> bool:
        """Return whether what `put` stored is there, wherever the storage was then. Raises `StoreUnavailable`."""
        path = self._path(uri)
        return await in_storage_thread(lambda: bool(self._files.exists(path)), doing="lookup")

    async def delete(self, uri: str) -> None:
        """Remove what `put` stored, wherever the storage was then; nothing happens when it is not there."""
        path = self._path(uri)
        with suppress(FileNotFoundError):
            await in_storage_thread(lambda: self._files.rm(path, recursive=True), doing="delete")

    def _path(self, uri: str) -> str:
        return f"{self._root}/{LORAS}/{uri.rpartition(f'/{LORAS}/')[2]}"

    def _write(self, source: Path, path: str) -> None:
        """Upload, and check the stored size: some storages report a truncated upload as a success."""
        if self._is_local:
            with source.open("rb") as file, atomic_file(Path(path)) as draft:
                shutil.copyfileobj(file, draft)
            return
        self._files.put_file(str(source), path)
        stored, size = self._files.info(path)["size"], source.stat().st_size
        if stored != size:
            raise OSError(f"{stored} of {size} bytes were stored")


def where_it_is(adapter: Adapter, storage: str) -> Adapter:
    """The adapter with the place of its weights in this storage, if they are named by their digest.

    Its record has the place of its registration: since then the storage may have moved, or been restored elsewhere.
    """
    name = _name(adapter.sha256, is_folder=adapter.is_folder)
    return replace(adapter, file=f"{storage.rstrip('/')}/{name}") if adapter.file.endswith(f"/{name}") else adapter


def _name(sha256: str, *, is_folder: bool) -> str:
    return f"{LORAS}/{sha256}" if is_folder else f"{LORAS}/{sha256}.safetensors"


ASK_AGAIN_S, WAIT_S = 0.05, 60.0
"""How often and how long a registration asks while another process removes the same weights."""
HOLD_LIFE = timedelta(hours=1)
"""The hold of a registration that was killed ends after this time; storing takes minutes at the most."""
REMOVAL_LIFE = timedelta(minutes=2)
"""The mark of a removal that was killed ends after this time; a storage call ends after 30 s."""
REMOVED_AT_ONCE = 100


class LoraWeights:
    """The stored weights, and the list of those to remove.

    Only what was put on the list is ever removed: an empty Redis removes nothing.
    """

    def __init__(self, redis: RedisClient, files: LoraFiles) -> None:
        self.files = files
        self._redis = redis
        self._hold = Script(redis, "loras/hold_weights")
        self._release = Script(redis, "loras/release_weights")
        self._due = Script(redis, "loras/due_weights")

    @asynccontextmanager
    async def held(self, uri: str) -> AsyncGenerator[None]:
        """Keep the weights at `uri` from removal; afterwards they go unless a LoRA has them.

        Raises `StoreUnavailable`.
        """
        token = secrets.token_hex(8)
        try:
            async with asyncio.timeout(WAIT_S):
                while not await self.hold(uri, token):  # noqa: ASYNC110 - it waits for another process
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise StoreUnavailable("the same weights are being removed") from None
        try:
            yield
        finally:
            await self._release(uri=uri, token=token)
            await self.remove_unused()

    async def remove_unused(self) -> int:
        """Remove the weights that are due; return how many went.

        What a storage that is down keeps is due again in two minutes.
        """
        removed = 0
        for uri in await self.due():
            try:
                await self.files.delete(uri)
            except StoreUnavailable as outage:
                _log.warning("stored weights of a LoRA stay for now: %s", outage.message)
                continue
            await self.gone(uri)
            removed += 1
        return removed

    async def hold(self, uri: str, token: str, *, life: timedelta = HOLD_LIFE) -> bool:
        """Keep the weights for this long; False while they are being removed: ask again."""
        return await self._hold(uri=uri, token=token, life_ms=milliseconds(life)) == 1

    async def due(self) -> list[str]:
        """Return the URIs that the caller has to remove; they are due again until `gone`."""
        return await self._due(life_ms=milliseconds(REMOVAL_LIFE), limit=REMOVED_AT_ONCE)

    async def gone(self, uri: str) -> None:
        """Take removed weights off the list."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.zrem(redis_key("loras_unused"), uri)
        pipeline.zrem(redis_key("loras_removing"), uri)
        await pipeline.execute()
