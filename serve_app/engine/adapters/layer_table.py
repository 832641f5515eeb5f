"""Finds a base model's layers by every name that adapter files use for them.

`outlined_table` keeps a base model's layer names and shapes in a small file, made once from its configuration. Making
that file imports diffusers and transformers (6 s); checking an adapter against it needs neither.
"""

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from serve_app.atomic_files import write_atomically

BARE_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "lycoris_")
"""ComfyUI, whole checkpoints, and LyCORIS without a trainer write these prefixes, which say nothing of the
component."""


class Layer(Protocol):
    @property
    def weight(self) -> torch.Tensor: ...


class LayersOfComponent(Protocol):
    """What the table reads of a `Component`, so that it can be made without a model."""

    @property
    def layers(self) -> Mapping[str, Layer]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def prefixes(self) -> Sequence[str]: ...
    @property
    def fused(self) -> Mapping[str, Sequence[str]]: ...


class LayerTable:
    """Finds a layer by the name that a file gives it. kohya writes underscores for dots.

    A fused name, which stands for several layers, is found and has a shape like a layer's own.
    """

    def __init__(self, components: Mapping[str, LayersOfComponent], denoiser: str, *, name: str = "") -> None:
        """`name` is what messages call the base model: its id."""
        self.name = name
        self.components = components
        self.denoiser = denoiser
        self.shapes: dict[tuple[str, str], torch.Size] = {}
        self._names: dict[tuple[str, str], str] = {}
        for name, component in components.items():
            for layer, module in component.layers.items():
                self.shapes[name, layer] = module.weight.shape
                self._add(name, {layer, layer.removesuffix(".0") if layer.endswith("to_out.0") else layer}, layer)
            for alias, layer in component.aliases.items():
                self._add(name, {alias}, layer)
            for fused, layers in component.fused.items():
                outputs = sum(self.shapes[name, layer][0] for layer in layers)
                self.shapes[name, fused] = torch.Size((outputs, *self.shapes[name, layers[0]][1:]))
                self._add(name, {fused}, fused)
        self._prefixes = self._component_prefixes()

    def find(self, stem: str, *, unprefixed_text: str = "text_encoder") -> tuple[str, str] | None:
        """Find component and layer of `lora_te1_text_model_…` or `text_encoder.text_model.…`, or None.

        A name without a prefix is the denoiser's, or that of the text encoder `unprefixed_text`. VideoX-Fun writes two
        underscores after a prefix, and TheLastBen's trainer one at the end.
        """
        plain = stem.removesuffix("_lora").replace(".processor.", ".").removeprefix("base_model.model.").rstrip("_")
        for prefix, component in self._prefixes.items():
            if plain.startswith(prefix) and (found := self._layer(component, plain[len(prefix) :].lstrip("_"))):
                return found
        bare = next((plain.removeprefix(prefix) for prefix in BARE_PREFIXES if plain.startswith(prefix)), plain)
        bare = bare.lstrip("_")
        return self._layer(self.denoiser, bare) or self._layer(unprefixed_text, bare)

    def layers_of(self, component: str, name: str) -> Sequence[str]:
        """Return the layers that a found name stands for, in the order of their outputs."""
        return self.components[component].fused.get(name, (name,))

    def base_weight(self, component: str, layer: str) -> torch.Tensor:
        """Return the base model's weight of a layer, [out, in…]."""
        return self.components[component].layers[layer].weight

    @property
    def context_width(self) -> int | None:
        """Return width of the text embeddings that cross attention reads: 768 in SD 1, 1024 in SD 2, 2048 in SDXL."""
        widths = {shape[1] for (_, name), shape in self.shapes.items() if name.endswith("attn2.to_k")}
        return widths.pop() if len(widths) == 1 else None

    def _layer(self, component: str, name: str) -> tuple[str, str] | None:
        layer = self._names.get((component, name)) or self._names.get((component, name.replace(".", "_")))
        return None if layer is None else (component, layer)

    def _component_prefixes(self) -> dict[str, str]:
        """Longest first: `lora_te1_` before `lora_te_`."""
        prefixes = {
            prefix: name
            for name, part in self.components.items()
            for prefix in (f"{name}.", f"{name}_", *part.prefixes)
        }
        return dict(sorted(prefixes.items(), key=lambda item: -len(item[0])))

    def _add(self, component: str, spellings: set[str], layer: str) -> None:
        for spelling in spellings | {spelling.replace(".", "_") for spelling in spellings}:
            self._names[component, spelling] = layer


class UnusableAdapter(ValueError):
    """The adapter is incompatible with this base model; the message says why, with the keys that offended."""


VERSION = 2
"""The version of the file's form and rules: raise it when names or aliases of layers change."""
_INDEX = "model_index.json"


class OutlinedLayer(NamedTuple):
    """A layer whose weight is of torch's meta device: it has a shape and no numbers."""

    weight: Tensor


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
        meta_layers = importlib.import_module("serve_app.engine.families.registry")
        written = _write(meta_layers.load_meta_layers(folder))
        with suppress(OSError):  # on a full disk the next time takes as long
            write_atomically(file, written)
    return _read(written, name)


def _digest(folder: Path) -> str:
    """Return a digest of everything that the table depends on."""
    digest = hashlib.sha256(f"{VERSION}\n".encode())
    for path in (folder / _INDEX, *sorted(folder.glob("*/config.json"))):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _write(table: LayerTable) -> bytes:
    parts = {
        name: {
            "layers": {layer: list(module.weight.shape) for layer, module in component.layers.items()},
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
            {layer: OutlinedLayer(torch.empty(shape, device="meta")) for layer, shape in part["layers"].items()},
            part["aliases"],
            part["prefixes"],
            part["fused"],
        )
        for component, part in document["components"].items()
    }
    return LayerTable(components, document["denoiser"], name=name)
