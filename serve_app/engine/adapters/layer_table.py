"""Finds a base model's layers by every name that adapter files use for them. Nothing here loads torch."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

BARE_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "lycoris_")
"""ComfyUI, whole checkpoints, and LyCORIS without a trainer write these prefixes, which say nothing of the
component."""


class Layer(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def weight(self) -> "Tensor": ...


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
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self._names: dict[tuple[str, str], str] = {}
        for name, component in components.items():
            for layer, module in component.layers.items():
                self.shapes[name, layer] = tuple(module.shape)
                self._add(name, {layer, layer.removesuffix(".0") if layer.endswith("to_out.0") else layer}, layer)
            for alias, layer in component.aliases.items():
                self._add(name, {alias}, layer)
            for fused, layers in component.fused.items():
                outputs = sum(self.shapes[name, layer][0] for layer in layers)
                self.shapes[name, fused] = (outputs, *self.shapes[name, layers[0]][1:])
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

    def base_weight(self, component: str, layer: str) -> "Tensor":
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
