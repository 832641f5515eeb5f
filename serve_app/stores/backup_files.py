"""Files of a backup: parts with keys, a list of objects, the local secrets, and a manifest of digests."""

import gzip
import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app.atomic_files import PRIVATE, PRIVATE_FOLDER, write_atomically
from serve_app.domain.errors import AtelierError
from serve_app.stores.redis_copy import CopiedKey
from serve_app.stores.storage import open_filesystem, storage_errors

VERSION = 1
"""Of the files; a reader refuses a greater one."""
MANIFEST, OBJECTS, SECRETS = "manifest.json", "objects.txt.gz", "secrets.json"


class BackupError(AtelierError):
    """A backup that is missing, damaged or of another version; the message says which file."""


class BackupFiles:
    """The files of one backup, in a folder of this machine (0700, files 0600) or at an fsspec URL."""

    def __init__(self, place: str, options: Mapping[str, Any]) -> None:
        is_url = "://" in place
        self._files, root = open_filesystem(
            place if is_url else str(Path(place).resolve()), dict(options) if is_url else {}
        )
        self._root = root.rstrip("/")
        self._is_local = "file" in self._files.protocol
        self._digests: dict[str, str] = {}

    def is_there(self) -> bool:
        return bool(self._files.exists(f"{self._root}/{MANIFEST}"))

    def write_keys(self, number: int, keys: Sequence[CopiedKey]) -> None:
        lines = [json.dumps([key.name, b64encode(key.value).decode(), key.ends_ms]) for key in keys]
        self._write(f"redis-{number:05}.jsonl.gz", gzip.compress("\n".join(lines).encode(), 6))

    def write_objects(self, names: Iterable[str]) -> None:
        self._write(OBJECTS, gzip.compress("\n".join(sorted(names)).encode(), 6))

    def write_secrets(self, text: str) -> None:
        self._write(SECRETS, text.encode())

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Write the manifest, last of all: a backup without it is incomplete."""
        manifest = {"version": VERSION, **facts, "files": self._digests}
        self._write(MANIFEST, json.dumps(manifest, indent=2).encode())

    def manifest(self) -> Mapping[str, Any]:
        """Read the manifest. Raises `BackupError`."""
        text = self._read(MANIFEST)
        try:
            manifest: Mapping[str, Any] = json.loads(text)
            version = int(manifest["version"])
        except (ValueError, KeyError, TypeError):
            raise BackupError(f"{MANIFEST} cannot be read") from None
        if version > VERSION:
            raise BackupError(f"the backup is of version {version}; this code reads up to {VERSION}")
        return manifest

    def manifest_digest(self) -> str:
        return hashlib.sha256(self._read(MANIFEST)).hexdigest()

    def keys(self, manifest: Mapping[str, Any]) -> Iterator[list[CopiedKey]]:
        """Yield the keys part by part, each checked against its digest. Raises `BackupError`."""
        for name in sorted(name for name in manifest["files"] if name.startswith("redis-")):
            text = gzip.decompress(self._checked(manifest, name)).decode()
            rows = [json.loads(line) for line in text.splitlines()]
            yield [CopiedKey(key, b64decode(value), ends_ms, {}) for key, value, ends_ms in rows]

    def objects(self, manifest: Mapping[str, Any]) -> list[str]:
        return gzip.decompress(self._checked(manifest, OBJECTS)).decode().splitlines()

    def secrets(self, manifest: Mapping[str, Any]) -> str | None:
        return self._checked(manifest, SECRETS).decode() if SECRETS in manifest["files"] else None

    def _checked(self, manifest: Mapping[str, Any], name: str) -> bytes:
        content = self._read(name)
        if hashlib.sha256(content).hexdigest() != manifest["files"].get(name):
            raise BackupError(f"{name} was changed after it was written")
        return content

    def _read(self, name: str) -> bytes:
        try:
            return self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            raise BackupError(f"there is no {name} in the backup") from None
        except storage_errors() as error:
            raise BackupError(f"{name} cannot be read ({type(error).__name__})") from error

    def _write(self, name: str, content: bytes) -> None:
        self._digests[name] = hashlib.sha256(content).hexdigest()
        path = f"{self._root}/{name}"
        if self._is_local:
            write_atomically(Path(path), content, mode=PRIVATE, folder_mode=PRIVATE_FOLDER)
            return
        try:
            self._files.pipe_file(path, content)
        except storage_errors() as error:
            raise BackupError(f"{name} cannot be written ({type(error).__name__})") from error
