"""Adds adapters into one: the change that each makes of the base alone, with a weight of its own.

An adapter makes W, a layer's weight, g·(W + s·BA), where s is its scale and g a gain of every output (DoRA, IA³) or, from
the other side, of every input. What several make of it alone, each less W, adds up to what one adapter makes of it: with
G = 1 + Σ(gᵢ - 1) that is G·(W + Σ(gᵢ·sᵢ / G)·BᵢAᵢ), so ranks are concatenated, and gains fold into ups or downs. PEFT lets
a DoRA scale what the adapters before it have changed, too: here none acts on another, and no order matters. A LoKr of
whole factors stays beside the ranks of others; two of them, or one and another's gain, make no Kronecker product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import ModuleWeights
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import AdapterWeights
from serve_app.engine.lora_layers import Factors


class _Change(NamedTuple):
    """What one adapter makes of a layer at its own weight, in float32."""

    down: Tensor
    factors: Factors | None
    """They are multiplied by the adapter's scale."""
    up: Tensor
    """[out, rank], times the adapter's scale."""
    slope: Tensor
    """The gain of each output less one, [out] or [1]; `input_slope` is that of each input, or of their channels."""
    input_slope: Tensor


def compose(
    adapters: Sequence[tuple[AdapterWeights, float]], table: LayerTable, *, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Return the adapter that does at scale 1 what `adapters` do together, each at its own weight.

    Raises UnusableAdapter where their ranks add up to more than `max_rank`, or where one has a gain of a layer's
    outputs and another of its inputs, which no adapter has both.
    """
    composed: AdapterWeights = {}
    places = ((component, layer) for weights, _ in adapters for component in weights for layer in weights[component])
    for component, layer in dict.fromkeys(places):
        base = table.base_weight(component, layer)
        changes = [
            _change(weights[component][layer], weight, base)
            for weights, weight in adapters
            if layer in weights.get(component, {})
        ]
        composed.setdefault(component, {})[layer] = _sum(f"{component}.{layer}", changes, max_rank, dtype)
    return composed


def _change(made: ModuleWeights, weight: float, base: Tensor) -> _Change:
    scale = float(weight != 0) if made.unscaled else weight
    down, up, factors = made.down.float(), made.up.float() * (made.scaling * scale), made.factors
    if factors is not None:
        factors = factors._replace(outer=factors.outer.float() * (made.scaling * scale)) if scale else None
    slope, input_slope = (torch.zeros(1) if it is None else it * weight for it in (made.slope, made.input_slope))
    if made.magnitude is not None:
        changed = base.detach().flatten(1).float().cpu() + made.change.flatten(1) * scale
        slope = made.magnitude / changed.norm(dim=1) - 1
    return _Change(down, factors, up, slope, input_slope)


def _sum(name: str, changes: Sequence[_Change], max_rank: int, dtype: torch.dtype) -> ModuleWeights:
    slope = _added([change.slope for change in changes], dtype)
    input_slope = _added([change.input_slope for change in changes], dtype)
    if bool(slope.any()) and bool(input_slope.any()):
        raise UnusableAdapter(
            f"{name}: one of these LoRAs has a gain of its outputs and another of its inputs, which cannot be added"
        )
    factored = [change for change in changes if change.factors is not None]
    gains = [gain for change in changes if change.factors is None for gain in (change.slope, change.input_slope)]
    if len(factored) > 1 or (factored and any(bool(gain.any()) for gain in gains)):
        raise UnusableAdapter(
            f"{name}: a LoKr that is applied by its factors cannot be added to another, nor to a DoRA or IA³: use one "
            "of them without the other"
        )
    low_rank = [change for change in changes if bool(change.up.any())] or factored or changes[:1]
    sides = [1] * (low_rank[0].down.dim() - 2)
    ups = [change.up * ((1 + change.slope) / (1 + slope))[:, None] for change in low_rank]
    downs = [change.down * ((1 + change.input_slope) / (1 + input_slope)).view(-1, *sides) for change in low_rank]
    slope, input_slope = (gain if bool(gain.any()) else None for gain in (slope, input_slope))
    made = ModuleWeights(torch.cat(downs), torch.cat(ups, 1), 1.0, None, slope, input_slope)
    made = made._replace(factors=factored[0].factors) if factored else made
    if (rank := made.size_rank) > max_rank:
        raise UnusableAdapter(
            f"the ranks of these LoRAs add up to {rank} in {name}, this server takes {max_rank}: use fewer, or smaller"
        )
    return made.to(dtype)


def _added(slopes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum, with no gain of 0, which would divide: instead one that rounding to `dtype` hides."""
    added, least = torch.stack(torch.broadcast_tensors(*slopes)).sum(0), torch.finfo(dtype).eps
    return torch.where((1 + added).abs() < least, least - 1, added)
