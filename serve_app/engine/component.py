"""Holds one module of a base model, such as its denoiser or a text encoder, with the layers that adapters change."""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from serve_app.engine.lora_layers import LoRALayer


class Component(NamedTuple):
    """A module of a base model whose layers adapters can change."""

    module: nn.Module
    layers: Mapping[str, LoRALayer]
    """The LoRA layers by the module's own names."""
    aliases: Mapping[str, str]
    """Further names that adapter files give a layer → its own name."""
    prefixes: Sequence[str]
    """What adapter files write before a layer's name, such as `lora_unet_` (kohya) or `clip_l.`; the component's own
    name and a dot always may stand there."""
    fused: Mapping[str, Sequence[str]] = {}
    """Names under which adapter files join several layers, whose outputs follow one another → those layers."""

    def another(self) -> "Component":
        """Return the component with module objects of its own, to bind other adapters to, over the same weights."""
        weights = (*self.module.parameters(), *self.module.buffers())
        module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in weights})
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoRALayer)}
        return self._replace(module=module, layers={name: layers[name] for name in self.layers})
