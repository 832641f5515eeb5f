"""Stores weights of registered LoRAs in object storage by digest, so that equal ones are there once."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from serve_app.atomic_files import atomic_file
from serve_app.domain.catalog import Adapter
from serve_app.settings import Settings
from serve_app.stores.storage import in_storage_thread, open_filesystem

LORAS = "loras"


class LoraFiles:
    """`<storage>/loras/<sha256>.safetensors`, and `<storage>/loras/<sha256>/` for a folder of PEFT."""

    def __init__(self, settings: Settings) -> None:
        self._storage = settings.storage.rstrip("/")
        self._files, root = open_filesystem(settings.storage, settings.storage_options)
        self._root = root.rstrip("/")
        self._is_local = "file" in self._files.protocol

    def uri(self, sha256: str, files: Iterable[str]) -> str:
        """Where `put` stores files of these names."""
        return f"{self._storage}/{_name(sha256, files)}"

    async def put(self, sha256: str, files: Mapping[str, Path]) -> str:
        """Store the files by name, '' for a single one, and return the URI of the file or folder.

        Raises `StoreUnavailable`.
        """
        name = _name(sha256, files)
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
        try:
            await in_storage_thread(lambda: self._files.rm(path, recursive=True), doing="delete")
        except FileNotFoundError:
            return

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
    name = f"{LORAS}/{adapter.sha256}" if adapter.is_folder else f"{LORAS}/{adapter.sha256}.safetensors"
    return replace(adapter, file=f"{storage.rstrip('/')}/{name}") if adapter.file.endswith(f"/{name}") else adapter


def _name(sha256: str, files: Iterable[str]) -> str:
    return f"{LORAS}/{sha256}.safetensors" if "" in files else f"{LORAS}/{sha256}"
