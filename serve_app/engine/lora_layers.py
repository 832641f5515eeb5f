"""Adds to each row of a linear or convolution its own low-rank change: y = base(x) + (x·down)·up.

A layer's `change` is bound before a forward pass, one per row, already multiplied by the row's scale. A layer that no
adapter of the batch changes has none and costs its base alone. DoRA (Liu et al. 2024) and IA³ (Liu et al. 2022)
multiply the output or the input by a gain per row. A LoKr of whole factors (Yeh et al. 2023) has no low rank: it is
applied as two small products.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_SHRUNK = 16
"""A linear's `down` is padded to this rank: from here on a product with more columns leaves these columns' bits alone
(measured on CPU; with 8 it sums in another order, in nearly the same time), so that ranks may mix in exact mode."""

LEAST_PRODUCT = 400
"""torch gives a product of fewer multiplications to a kernel that sums differently: a linear's `up` is padded so that
the product of a single position has this many."""

FACTORS_RANK = 32
"""The rank of a LoRA that takes as long as the copies of `add_factors` (22 to 38 at five sizes, measured on CPU)."""


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Factors(NamedTuple):
    """A linear layer's change that is the Kronecker product outer ⊗ inner, or that has some of its outputs."""

    outer: Tensor
    """[…, outputs, inputs]"""
    inner: Tensor
    """[…, outputs, inputs]"""
    first: int = 0
    """The product's output that is the layer's first: layers that were trained as one may divide it anywhere."""

    @property
    def work(self) -> int:
        """Return how many multiplications a position takes."""
        (outputs, inputs), (inner_outputs, inner_inputs) = self.outer.shape[-2:], self.inner.shape[-2:]
        return outputs * inner_inputs * (inputs + inner_outputs)

    def outputs(self, first: int, end: int) -> "Factors":
        """Return some outputs, with the rows of `outer` that they need."""
        size, first, end = self.inner.shape[0], first + self.first, end + self.first
        return Factors(self.outer[first // size : -(-end // size)], self.inner, first % size)

    def whole(self, outputs: int) -> Tensor:
        """Return the change of `outputs` outputs as one matrix in float32."""
        return torch.kron(self.outer.float(), self.inner.float())[self.first : self.first + outputs]


class Change(NamedTuple):
    """The change of every row in one layer. `down` and `up` are views made by the layer's own `view_*`."""

    down: Tensor
    """[rows, …]; of `down_rank`, which is no less than that of `up`."""
    up: Tensor
    """[rows, rank, out], of the layer's `up_rank`."""
    gain: Tensor | None = None
    """[rows, 1, out], by which (y - bias) is multiplied."""
    offset: Tensor | None = None
    """[rows, 1, out], bias·(1 - gain): (y - bias)·gain + bias = y·gain + offset."""
    input_gain: Tensor | None = None
    """[rows, in], by which the input or its channels are multiplied."""
    add: Callable[[Tensor, Tensor], None] | None = None
    """Where a kernel reads the slots itself, it adds the change of x [rows, positions, in] to y [rows, positions, out],
    and `down` and `up` are empty."""
    factors: Sequence[Factors] = ()
    """LoKr's factors, one item for all of the same sizes, with zeros for the rows that have none of these."""


class LoRALayer(nn.Module):
    """A layer with a low-rank change per row."""

    change: Change | None = None

    def __init__(self, base: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.base = base
        self.shape = base.weight.shape

    @property
    def rank(self) -> int:
        """Return the rank at which the rows' changes are computed, 0 where there are none."""
        return 0 if self.change is None else self.change.up.shape[1]

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def fan_out(self) -> int:
        return self.shape[0]

    @property
    def channels(self) -> int:
        """Return how many inputs, or channels of the input, have a gain of their own."""
        return self.shape[1]

    def up_rank(self, rank: int) -> int:
        """Return the rank that an `up` of `rank` is padded to with zeros."""
        return rank

    def down_rank(self, rank: int) -> int:
        """Return the rank that a `down` of `rank` is padded to with zeros."""
        return rank

    def view_up(self, flat: Tensor, rank: int) -> Tensor:
        """View flat rows as [rows, rank, out]."""
        return flat.view(-1, rank, self.fan_out)

    def view_down(self, flat: Tensor, rank: int) -> Tensor:
        """View flat rows with rank first in the second dimension, then the layer's input in reading order."""
        raise NotImplementedError

    def arrange_down(self, down: Tensor) -> Tensor:
        """Order a file's down matrix [rank, in…] as the numbers of one flat row."""
        raise NotImplementedError


def _apply_gain(y: Tensor, change: Change) -> Tensor:
    """Apply the gain of each row to y [rows, positions, out], in place."""
    if change.gain is None:
        return y
    y *= change.gain
    return y if change.offset is None else y.add_(change.offset)


class LoRALinear(LoRALayer):
    base: nn.Linear | nn.Conv2d

    def __init__(self, base: nn.Linear | nn.Conv2d) -> None:
        super().__init__(base)
        self._multiply: Linear | None = linear_of(base.weight.device)

    def use(self, base: Any) -> None:
        """Let a module with a weight and bias of the same shapes compute x·weightᵀ + bias in its own way."""
        self.base, self._multiply = base, None

    def forward(self, x: Tensor, shrunk: Tensor | None = None) -> Tensor:
        """x is [rows, …, in]; `shrunk` is this layer's part of `shrink_together`, where that has been called."""
        change, rows = self.change, x.shape[0]
        if change is not None and change.input_gain is not None:
            x = x * change.input_gain.view(rows, *(1,) * (x.dim() - 2), -1)
        y = self._multiply(x, self.base.weight.flatten(1), self.base.bias) if self._multiply else self.base(x)
        if change is None:
            return y
        flat, inputs = y.view(rows, -1, y.shape[-1]), x.reshape(rows, -1, x.shape[-1])
        if change.add is not None:
            change.add(flat, inputs)
        elif self.rank:
            if shrunk is None:
                shrunk = torch.bmm(inputs, change.down.transpose(1, 2))
            flat.baddbmm_(shrunk[..., : change.up.shape[1]], change.up)
        for factors in change.factors:
            add_factors(flat, inputs, factors)
        return _apply_gain(flat, change).view(y.shape)

    def up_rank(self, rank: int) -> int:
        return max(rank, -(-LEAST_PRODUCT // self.fan_out))

    def down_rank(self, rank: int) -> int:
        return max(LEAST_SHRUNK, self.up_rank(rank))

    def view_down(self, flat: Tensor, rank: int) -> Tensor:
        return flat.view(-1, rank, self.fan_in)

    def arrange_down(self, down: Tensor) -> Tensor:
        return down.flatten(1)


class LoRAPointwise(LoRALinear):
    """A 1×1 convolution, computed as a linear over channels.

    With one thread torch computes a small batch of 1×1 convolutions by another kernel than a large one, and a row's
    bits would depend on the other rows."""

    def forward(self, x: Tensor, shrunk: Tensor | None = None) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1).contiguous(), shrunk).permute(0, 3, 1, 2)


class LoRAConv(LoRALayer):
    base: nn.Conv2d

    strided_apart = False
    """With strides, take one row at a time: cuDNN sums the last one of a call differently (seen on an H200)."""

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__(base)
        self.folds = base.weight.device.type == "cpu"
        """Whether `down` is stored for and applied by a fold, or by a convolution of groups."""

    def forward(self, x: Tensor) -> Tensor:
        change = self.change
        if change is not None and change.input_gain is not None:
            x = x * change.input_gain[:, :, None, None]
        y = self._convolve(x)
        if change is None:
            return y
        last = y.permute(0, 2, 3, 1)
        shrunk = (self._shrink_by_fold if self.folds else self._shrink_by_groups)(x, change.down)
        flat = last.reshape(x.shape[0], -1, self.fan_out).baddbmm_(shrunk.flatten(2).transpose(1, 2), change.up)
        return _apply_gain(flat, change).view(last.shape).permute(0, 3, 1, 2)

    def _convolve(self, x: Tensor) -> Tensor:
        if self.strided_apart and max(self.base.stride) > 1:
            return torch.cat([self.base(row) for row in x.split(1)])
        return self.base(x)

    def _shrink_by_fold(self, x: Tensor, down: Tensor) -> Tensor:
        """Compute x·down as [rows, rank, height, width]: a batched product over the kernel, summed by `fold`.

        On a CPU it takes half to two thirds of the time of a convolution per run (measured)."""
        rows, channels, *sides = x.shape
        spread = torch.bmm(down, x.permute(0, 2, 3, 1).reshape(rows, -1, channels).transpose(1, 2))
        _, padding, dilation = _sliding(self.base)
        reach = [d * (k - 1) for d, k in zip(dilation, self.base.kernel_size, strict=True)]
        unstrided = tuple(side + 2 * p - r for side, p, r in zip(sides, padding, reach, strict=True))
        cut = tuple(r - p for r, p in zip(reach, padding, strict=True))
        whole = F.fold(spread, unstrided, self.base.kernel_size, dilation, cut)
        return whole[..., :: self.base.stride[0], :: self.base.stride[1]]

    def _shrink_by_groups(self, x: Tensor, down: Tensor) -> Tensor:
        """Compute the same by one convolution with a group per row, which on a GPU is one kernel."""
        rows, channels, *sides = x.shape
        stacked = x.reshape(1, rows * channels, *sides)
        shrunk = F.conv2d(stacked, down.flatten(0, 1), None, *_sliding(self.base), rows)
        return shrunk.view(rows, -1, *shrunk.shape[2:])

    def view_down(self, flat: Tensor, rank: int) -> Tensor:
        """[rows, rank·kernel size, channels] to fold, else [rows, rank, channels, kernel, kernel]."""
        channels = self.shape[1]
        if self.folds:
            return flat.view(-1, rank * math.prod(self.base.kernel_size), channels)
        return flat.view(-1, rank, *self.base.kernel_size, channels).permute(0, 1, 4, 2, 3)

    def arrange_down(self, down: Tensor) -> Tensor:
        kernels = down.view(-1, *self.shape[1:])
        return (kernels.flip(2, 3) if self.folds else kernels).permute(0, 2, 3, 1)  # fold writes where conv2d reads


def wrap_layers(module: nn.Module) -> Mapping[str, LoRALayer]:
    """Wrap every linear and convolution inside `module` in a LoRA layer; return these by layer name."""
    layers: dict[str, LoRALayer] = {}
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            layers[name] = LoRALinear(child)
        elif isinstance(child, nn.Conv2d) and child.groups == 1 and child.padding_mode == "zeros":
            layers[name] = LoRAPointwise(child) if _is_pointwise(child) else LoRAConv(child)
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, layer)
    return layers


def shrink_together(x: Tensor, layers: Sequence[LoRALayer]) -> list[Tensor | None]:
    """Return x·down for each of the `layers`, None where there is none, as one product; x is [rows, positions, in].

    It is always as wide as for all layers: in a narrower product a row's bits differ (measured on CPU), and they must
    not depend on which layers the other rows' adapters change.
    """
    changes = [layer.change if layer.rank else None for layer in layers]
    blank = next((change.down for change in changes if change is not None), None)
    if blank is None:
        return [None] * len(layers)
    downs = [torch.zeros_like(blank) if change is None else change.down for change in changes]
    joined, whole = _join(downs).transpose(1, 2), None
    parts: list[Tensor | None] = []
    for i, change in enumerate(changes):
        if change is not None and change.input_gain is not None:
            product = torch.bmm(x * change.input_gain[:, None], joined)
        else:
            product = whole = torch.bmm(x, joined) if whole is None else whole
        parts.append(product.split(blank.shape[1], 2)[i])
    return parts


def apply_together(x: Tensor, layers: Sequence[LoRALayer]) -> list[Tensor]:
    """Return what each of the `layers` makes of x, of which their adapters' parts share one product."""
    return [layer(x, shrunk) for layer, shrunk in zip(layers, shrink_together(x, layers), strict=True)]


def add_factors(y: Tensor, x: Tensor, factors: Factors) -> None:
    """Add (outer ⊗ inner)·x of each row to `y` in place; y is [rows, positions, out], x [rows, positions, in]."""
    (outer, inner, first), (rows, positions, fan_out) = factors, y.shape
    (_, outputs, inputs), (_, inner_outputs, inner_inputs) = outer.shape, inner.shape
    sides = x.view(rows, positions, inputs, inner_inputs).transpose(1, 2)
    mixed = torch.bmm(outer, sides.reshape(rows, inputs, -1)).view(rows, -1, inner_inputs)
    made = torch.bmm(mixed, inner.transpose(1, 2)).view(rows, outputs, positions, inner_outputs).transpose(1, 2)
    if outputs * inner_outputs == fan_out:
        y.view(made.shape).add_(made)
    else:
        y.add_(made.flatten(2)[..., first : first + fan_out])


def _join(downs: Sequence[Tensor]) -> Tensor:
    """Return matrices [rows, rank, in] as one [rows, all ranks, in], a view where they lie side by side."""
    first, (rows, rank, width) = downs[0], downs[0].shape

    def follows(down: Tensor, place: int) -> bool:
        is_same = down.untyped_storage() is first.untyped_storage()
        return is_same and down.storage_offset() == first.storage_offset() + place * rank * width

    if not all(follows(down, i) for i, down in enumerate(downs)):
        return torch.cat(list(downs), 1)
    return first.as_strided((rows, len(downs) * rank, width), first.stride())


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the kernel that torch.compile emits on CPUs.

    It is 2 to 3 times as fast as F.linear (MKL) on an AMD processor, and its rows keep their bits at every batch
    size from two up (measured, see benchmarks/RESULTS.md)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def linear_of(device: torch.device) -> Linear:
    """Return what computes x·weightᵀ + bias on this device."""
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return onednn_linear if device.type == "cpu" and has_onednn else F.linear


def _sliding(layer: nn.Conv2d) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Stride, padding, dilation."""
    assert not isinstance(layer.padding, str)
    return layer.stride, layer.padding, layer.dilation


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.stride == (1, 1) and layer.padding in ((0, 0), 0)
