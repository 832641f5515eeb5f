"""Adds to each row of a linear or convolution its own low-rank change: y = base(x) + (x·down)·up.

`down` and `up` are bound before a forward pass, one per row, already multiplied by the row's scale. A layer that no
adapter of the batch changes has rank 0 and costs its base alone. DoRA (Liu et al. 2024) and IA³ (Liu et al. 2022)
multiply the output or the input by a gain per row.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRALayer(nn.Module):
    """A layer with a low-rank change per row. `down` and `up` are views made by this layer's own `view_*`."""

    down: Tensor
    up: Tensor
    gain: Tensor
    offset: Tensor | None
    input_gain: Tensor | None

    def __init__(self, base: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.base = base
        self.unbind()

    def unbind(self) -> None:
        """Remove the change of every row."""
        self.rank = 0
        self.has_gain = False
        self.input_gain = None

    def bind(self, down: Tensor, up: Tensor, gain: Tensor | None = None, input_gain: Tensor | None = None) -> None:
        """Set the change of each row; the gains are [rows, out] and [rows, in].

        `up` may be padded with zeros to a higher rank than `down`.
        """
        self.down, self.up, self.rank = down, up, up.shape[1]
        self.has_gain = gain is not None
        self.input_gain = input_gain
        if gain is not None:
            self.gain = gain[:, None]
            self.offset = None if self.bias is None else _offset(self.bias, gain)[:, None]

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @property
    def fan_in(self) -> int:
        return math.prod(self.weight.shape[1:])

    @property
    def fan_out(self) -> int:
        return self.weight.shape[0]

    def view_up(self, flat: Tensor, rank: int) -> Tensor:
        """View flat rows as [rows, rank, out]."""
        return flat.view(-1, rank, self.fan_out)

    def view_down(self, flat: Tensor, rank: int) -> Tensor:
        """View flat rows with rank first in the second dimension, then the layer's input in reading order."""
        raise NotImplementedError

    def arrange_down(self, down: Tensor) -> Tensor:
        """Order a file's down matrix [rank, in…] as one row of `view_down`."""
        raise NotImplementedError

    def _add(self, y: Tensor, shrunk: Tensor) -> Tensor:
        """Add shrunk·up to y and apply the gain: y [rows, positions, out], shrunk [rows, positions, rank]."""
        y.baddbmm_(F.pad(shrunk, (0, self.rank - shrunk.shape[2])), self.up)
        if not self.has_gain:
            return y
        y *= self.gain
        return y if self.offset is None else y.add_(self.offset)


class LoRALinear(LoRALayer):
    def __init__(self, base: nn.Linear | nn.Conv2d) -> None:
        super().__init__(base)
        self._multiply = onednn_linear if _has_onednn_linear(base.weight) else F.linear

    def forward(self, x: Tensor) -> Tensor:
        """x is [rows, …, in]."""
        if self.input_gain is not None:
            x = x * self.input_gain.view(len(x), *(1,) * (x.dim() - 2), -1)
        y = self._multiply(x, self.base.weight.flatten(1), self.base.bias)
        if not self.rank:
            return y
        rows = x.shape[0]
        shrunk = torch.bmm(x.reshape(rows, -1, x.shape[-1]), self.down.transpose(1, 2))
        return self._add(y.view(rows, -1, y.shape[-1]), shrunk).view(y.shape)

    def view_down(self, flat: Tensor, rank: int) -> Tensor:
        return flat.view(-1, rank, self.fan_in)

    def arrange_down(self, down: Tensor) -> Tensor:
        return down.flatten(1)


class LoRAPointwise(LoRALinear):
    """A 1×1 convolution, computed as a linear over channels.

    With one thread torch computes a small batch of 1×1 convolutions by another kernel than a large one, and a row's
    bits would depend on the other rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


class LoRAConv(LoRALayer):
    base: nn.Conv2d

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__(base)
        self.folds = base.weight.device.type == "cpu"
        """Whether `down` is stored for and applied by a fold, or by a convolution of groups."""

    def forward(self, x: Tensor) -> Tensor:
        if self.input_gain is not None:
            x = x * self.input_gain[:, :, None, None]
        y = self.base(x)
        if not self.rank:
            return y
        last = y.permute(0, 2, 3, 1)
        shrunk = (self._shrink_by_fold if self.folds else self._shrink_by_groups)(x)
        out = self._add(last.reshape(x.shape[0], -1, self.fan_out), shrunk.flatten(2).transpose(1, 2))
        return out.view(last.shape).permute(0, 3, 1, 2)

    def _shrink_by_fold(self, x: Tensor) -> Tensor:
        """Compute x·down as [rows, rank, height, width]: a batched product over the kernel, summed by `fold`.

        On a CPU it takes half to two thirds of the time of a convolution per run (measured)."""
        rows, channels, *sides = x.shape
        spread = torch.bmm(self.down, x.permute(0, 2, 3, 1).reshape(rows, -1, channels).transpose(1, 2))
        _, padding, dilation = _sliding(self.base)
        reach = [d * (k - 1) for d, k in zip(dilation, self.base.kernel_size, strict=True)]
        unstrided = tuple(side + 2 * p - r for side, p, r in zip(sides, padding, reach, strict=True))
        cut = tuple(r - p for r, p in zip(reach, padding, strict=True))
        whole = F.fold(spread, unstrided, self.base.kernel_size, dilation, cut)
        return whole[..., :: self.base.stride[0], :: self.base.stride[1]]

    def _shrink_by_groups(self, x: Tensor) -> Tensor:
        """Compute the same by one convolution with a group per row, which on a GPU is one kernel."""
        rows, channels, *sides = x.shape
        stacked = x.reshape(1, rows * channels, *sides)
        shrunk = F.conv2d(stacked, self.down.flatten(0, 1), None, *_sliding(self.base), rows)
        return shrunk.view(rows, -1, *shrunk.shape[2:])

    def view_down(self, flat: Tensor, rank: int) -> Tensor:
        """[rows, rank·kernel size, channels] to fold, else [rows, rank, channels, kernel, kernel]."""
        channels = self.weight.shape[1]
        if self.folds:
            return flat.view(-1, rank * math.prod(self.base.kernel_size), channels)
        return flat.view(-1, rank, *self.base.kernel_size, channels).permute(0, 1, 4, 2, 3)

    def arrange_down(self, down: Tensor) -> Tensor:
        kernels = down.view(-1, *self.weight.shape[1:])
        if not self.folds:
            return kernels
        return kernels.flip(2, 3).permute(0, 2, 3, 1).flatten(0, 2)  # fold writes where a convolution reads


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


def _offset(bias: Tensor, gain: Tensor) -> Tensor:
    """Return bias·(1 - gain), [rows, out], by which (y - bias)·gain + bias = y·gain + offset.

    At a gain of 1 it is -0, the one number that changes no bit of what it is added to: a row without a gain must not
    notice that it stands beside one with.
    """
    return torch.where(gain == 1, -torch.zeros_like(gain), bias * (1 - gain))


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the kernel that torch.compile emits on CPUs.

    Beside F.linear (MKL) it is 2 to 3 times as fast on an AMD processor, and its rows keep their bits at every batch
    size from two up (measured, see benchmarks/RESULTS.md)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _has_onednn_linear(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _sliding(layer: nn.Conv2d) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Stride, padding, dilation."""
    assert not isinstance(layer.padding, str)
    return layer.stride, layer.padding, layer.dilation


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.stride == (1, 1) and layer.padding in ((0, 0), 0)
