"""Keeps a base model's layer names and shapes in a small file, made once from its configuration.

Making that file loads torch, diffusers and transformers (6 s); checking the names of an adapter against it needs none.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serve_app.atomic_files import write_atomically
from serve_app.engine import loading
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.model_folder import index_file

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 3
"""The version of the file's form and rules: raise it when names or aliases of layers change."""


class OutlinedLayer(NamedTuple):
    """A layer that has a shape and no numbers."""

    shape: Sequence[int]

    @property
    def weight(self) -> "Tensor":
        """Return a weight of torch's meta device, which is loaded first here."""
        import torch

        return torch.empty(self.shape, device="meta")


class OutlinedComponent(NamedTuple):
    """What a `Component` is called and shaped like."""

    layers: Mapping[str, OutlinedLayer]
    aliases: Mapping[str, str]
    prefixes: Sequence[str]
    fused: Mapping[str, Sequence[str]] = {}


def outlined_table(folder: Path, kept: Path, *, name: str = "") -> LayerTable:
    """Return the layer table of the diffusers folder `folder` from its file in `kept`, without weights.

    `name` is what messages call the base model. Makes the file where it is missing. Raises OSError, or ValueError for a
    family that is not supported.
    """
    file = kept / f"{_digest(folder)}.json"
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        with loading():
            from serve_app.engine.families.registry import load_meta_layers  # it loads diffusers and transformers

        written = _write(load_meta_layers(folder))
        with suppress(OSError):  # on a full disk the next time takes as long
            write_atomically(file, written)
    return _read(written, name)


def _digest(folder: Path) -> str:
    """Return a digest of everything that the table depends on."""
    digest = hashlib.sha256(f"{VERSION}\n".encode())
    for path in (index_file(folder), *sorted(folder.glob("*/config.json"))):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _write(table: LayerTable) -> bytes:
    parts = {
        name: {
            "layers": {layer: list(module.shape) for layer, module in component.layers.items()},
            "aliases": dict(component.aliases),
            "prefixes": list(component.prefixes),
            "fused": {fused: list(layers) for fused, layers in component.fused.items()},
        }
        for name, component in table.components.items()
    }
    return json.dumps({"denoiser": table.denoiser, "components": parts}, separators=(",", ":")).encode()


def _read(written: bytes, name: str) -> LayerTable:
    document: dict[str, Any] = json.loads(written)
    components = {
        component: OutlinedComponent(
            **part | {"layers": {layer: OutlinedLayer(shape) for layer, shape in part["layers"].items()}}
        )
        for component, part in document["components"].items()
    }
    return LayerTable(components, document["denoiser"], name=name)
