"""Keeps a base model's layer names and shapes in a small file, made once from its configuration.

Making it imports diffusers and transformers (6 s); checking an adapter against it needs neither.
"""

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serve_app.atomic_files import write_atomically
from serve_app.engine.adapters.layer_table import LayersOfComponent, LayerTable

VERSION = 1
"""Of the file's form and of the rules by which it is made: raise it when the names or aliases of layers change."""
_INDEX = "model_index.json"


class OutlinedLayer(NamedTuple):
    """A layer whose weight is taken as ones: what depends on it is only known to be finite."""

    weight: Tensor


class OutlinedComponent(NamedTuple):
    """What a `Component` is called and shaped like."""

    layers: Mapping[str, OutlinedLayer]
    aliases: Mapping[str, str]
    kohya_prefixes: Sequence[str]


def outlined_table(folder: Path, kept: Path, *, name: str = "") -> LayerTable:
    """Return the layer table of the diffusers folder `folder` from its file in `kept`, without weights.

    `name` is what messages call the base model. Makes the file where it is missing. Raises OSError, or ValueError for a family that is not supported.
    """
    file = kept / f"{_digest(folder)}.json"
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        meta_layers = importlib.import_module("serve_app.engine.families.meta_layers")
        written = _write(meta_layers.load_meta_layers(folder))
        with suppress(OSError):  # a full disk: the next time takes as long
            write_atomically(file, written)
    return _read(written, name)


def _digest(folder: Path) -> str:
    """Of everything that the table depends on."""
    digest = hashlib.sha256(f"{VERSION}\n".encode())
    for path in (folder / _INDEX, *sorted(folder.glob("*/config.json"))):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _write(table: LayerTable) -> bytes:
    parts = {name: _outline(component) for name, component in table.components.items()}
    return json.dumps({"denoiser": table.denoiser, "components": parts}, separators=(",", ":")).encode()


def _outline(component: LayersOfComponent) -> dict[str, Any]:
    return {
        "layers": {name: list(layer.weight.shape) for name, layer in component.layers.items()},
        "aliases": dict(component.aliases),
        "kohya_prefixes": list(component.kohya_prefixes),
    }


def _read(written: bytes, name: str) -> LayerTable:
    document: dict[str, Any] = json.loads(written)
    one = torch.ones(())
    components = {
        component: OutlinedComponent(
            {layer: OutlinedLayer(one.expand(shape)) for layer, shape in part["layers"].items()},
            part["aliases"],
            part["kohya_prefixes"],
        )
        for component, part in document["components"].items()
    }
    return LayerTable(components, document["denoiser"], name=name)
