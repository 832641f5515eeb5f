"""Weight files in their storage, a safetensors file or a PEFT folder: their digests and versions."""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import fsspec

from serve_app.domain.catalog import Adapter

PEFT_CONFIG = "adapter_config.json"
PEFT_FILES = (PEFT_CONFIG, "adapter_model.safetensors")
"""The files of a folder that count; others beside them are not read."""
MAX_CONFIG_BYTES = 1 << 20
_BLOCK = 1 << 20
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "generation")
"""What storages call a file's version."""


def weight_files(adapter: Adapter) -> Mapping[str, str]:
    """The adapter's files by name: a folder's own names, '' for a file."""
    if not adapter.is_folder:
        return {"": adapter.file}
    return {name: f"{adapter.file.rstrip('/')}/{name}" for name in PEFT_FILES}


def weights_digest(digests: Mapping[str, str]) -> str:
    """Return the identity of weights from the SHA-256 of each file.

    Of a folder, it is the SHA-256 of its lines `<digest>  <name>`, in this order.
    """
    if "" in digests:
        return digests[""]
    lines = "".join(f"{digests[name]}  {name}\n" for name in PEFT_FILES)
    return hashlib.sha256(lines.encode()).hexdigest()


@contextmanager
def opened(uri: str, options: Mapping[str, Any]) -> Generator[BinaryIO]:
    """A file of any storage, for reading. Raises OSError."""
    with cast(Any, fsspec.open(uri, "rb", **_options_of(uri, options))) as file:
        yield file


def file_digest(uri: str, options: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    with opened(uri, options) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def file_version(uri: str, options: Mapping[str, Any]) -> str | None:
    """Return what changes when the file does: its size with its time or its entity tag.

    None where the storage knows neither.
    """
    files, path = cast(tuple[Any, str], fsspec.core.url_to_fs(uri, **_options_of(uri, options)))
    info: Mapping[str, Any] = files.info(path)
    marks: Sequence[str] = [str(info[name]) for name in _VERSIONS if info.get(name) is not None]
    return f"{info.get('size')} {marks[0]}" if marks else None


def _options_of(uri: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    return options if "://" in uri and not uri.startswith("file://") else {}
