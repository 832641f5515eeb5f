"""Digests of the catalog's weight files, each read once and not at every start."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from serve_app.domain.catalog import Adapter
from serve_app.stores.catalog_file import SetAside
from serve_app.stores.storage import storage_errors
from serve_app.stores.weight_files import file_digest, file_version, weight_files, weights_digest


class Digested(NamedTuple):
    """Adapters with their digests, those whose files cannot be read, and what to store for the next start.

    `known`: URI → version and digest.
    """

    adapters: Sequence[Adapter]
    set_aside: Sequence[SetAside]
    known: Mapping[str, str]


def add_digests(adapters: Sequence[Adapter], known: Mapping[str, str], options: Mapping[str, Any]) -> Digested:
    """Give each adapter its digest: the row's, the `known` one of an unchanged file, or the file's."""
    found: list[Adapter] = []
    set_aside: list[SetAside] = []
    remembered: dict[str, str] = {}
    for adapter in adapters:
        if adapter.sha256:
            found.append(adapter)
            continue
        try:
            files = {name: _digest(uri, known, remembered, options) for name, uri in weight_files(adapter).items()}
        except (*storage_errors(), ValueError, ImportError) as error:
            kind = "folder" if adapter.is_folder else "file"
            reason = f"adapter {adapter.id}: {kind} {adapter.file} cannot be read ({type(error).__name__})"
            set_aside.append(SetAside(adapter.id, reason))
        else:
            found.append(replace(adapter, sha256=weights_digest(files)))
    return Digested(found, set_aside, remembered)


def _digest(uri: str, known: Mapping[str, str], remembered: dict[str, str], options: Mapping[str, Any]) -> str:
    """Return the file's digest, and remember it where the storage knows the file's version.

    The version is read first, so that a change between the two reads is seen next time.
    """
    version = file_version(uri, options)
    before, _, digest = known.get(uri, "").rpartition(" ")
    if version is None or before != version:
        digest = file_digest(uri, options)
    if version is not None:
        remembered[uri] = f"{version} {digest}"
    return digest
