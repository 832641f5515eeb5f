"""Gathers the adapters of a batch's rows into a buffer that its layers have views of.

A layout is the layers and the rank that some batch needs. Its plan says which part of an adapter each line of a
gathered row holds, and is made once; from the rows' slots the device then computes which lines of the store they are.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.adapter_store import LINE_BYTES, ONES, WORD, WORDS, ZEROS, line_count
from serve_app.engine.lora_layers import Change, Factors, LoRALayer
from serve_app.engine_options import MAX_RANK

RANK_BUCKETS = (8, 16, 32, 64, 128, MAX_RANK)
"""A batch's highest rank is rounded up to one of these: lower ranks are computed with it, padded with zeros."""
DOWN, UP, OUTER, INNER, NORM_0, NORM_1, NORM_2, SQUARE, SLOPE, INPUT_SLOPE = KINDS = range(10)
"""The kinds of an adapter's parts in a layer. OUTER and INNER are the two of `Factors`. The output's gain is
√(square / (norm_0 + scale·norm_1 + scale²·norm_2)) + scale·slope, where DoRA's norms are the coefficients of
‖W + scale·BA‖² and square is m²; the gain of the input is 1 + scale·input_slope."""
GAINS = range(NORM_0, INPUT_SLOPE)
FACTORS = range(OUTER, NORM_0)
ABSENT = (ZEROS, ZEROS, ZEROS, ZEROS, ONES, ZEROS, ZEROS, ONES, ZEROS, ZEROS)
"""The line that stands in for each kind of part where an adapter lacks it: it changes nothing."""
FLOAT = torch.float32
"""Gains are computed in this type."""
FLOATS = LINE_BYTES // FLOAT.itemsize
AddLora = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor], None]
"""Adds a layer's change to y, as `lora_kernels.add_lora`: its arguments are the store's numbers, the tables `starts`,
`ranks` and `unscaled`, a lane's rows, the layer's number, y and x."""
KEPT_VIEWS = 64
"""How many views are kept, one for each layout and row count."""


class Sizes(NamedTuple):
    """The sizes of a layer's two factors."""

    layer: int
    number: int
    """The device knows these sizes by this number, above 0, in every layer."""
    shapes: tuple[tuple[int, int], tuple[int, int]]
    first: int


class Layout(NamedTuple):
    """What gathered rows hold; layers are bits of a number, the first of `AdapterSlots.layers` the lowest."""

    rank: int = 0
    """One of `RANK_BUCKETS`; 0 where no layer changes by what is gathered."""
    changed: int = 0
    gained: int = 0
    """Layers whose output has a gain."""
    input_gained: int = 0
    unscaled: int = 0
    """Layers whose BA acts whole at every scale but 0."""
    straight: int = 0
    """Changed layers whose down and up a kernel reads in the slots, so that they are not gathered."""
    factored: frozenset[Sizes] = frozenset()
    """The factors that rows have in layers, which are `changed` only if some row has a down and an up there."""

    @property
    def touched(self) -> int:
        """Return the layers that have any part."""
        touched = self.changed | self.gained | self.input_gained
        for sizes in self.factored:
            touched |= 1 << sizes.layer
        return touched

    def joined(self, other: "Layout") -> "Layout":
        both: Any = zip(self[1:], other[1:], strict=True)
        return Layout(max(self.rank, other.rank), *(a | b for a, b in both))


class RowViews(NamedTuple):
    """A buffer's views for one layout and number of rows."""

    lines: Tensor
    """What is copied from the store."""
    ups: Tensor
    """[rows, lines, numbers]: what the rows' scales multiply, ups and the outer of two factors."""
    norms: Tensor
    """[rows, kinds, numbers] in float32: what the gains of outputs are computed from."""
    gains: Tensor
    """[2, rows, numbers]: the gains of outputs, and their offsets."""
    input_slopes: Tensor
    input_gains: Tensor
    changes: dict[int, Change]
    """Layer → its change."""


class Plan:
    """Where the parts of a layout lie in each gathered row, kind by kind."""

    def __init__(self, layout: Layout, layers: Sequence[LoRALayer], device: torch.device, dtype: torch.dtype) -> None:
        self._layout, self._layers, self._dtype = layout, layers, dtype
        self._numbers = LINE_BYTES // dtype.itemsize
        sizes = {part: line_count(size) for part, size in self._part_bytes()}
        self._starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        lengths = np.array([*sizes.values()], int)
        columns = *np.array([*sizes], np.int32).reshape(-1, 2).T, np.array([*self._starts.values()], np.int32)
        part, number, starts = (np.repeat(each, lengths) for each in columns)
        self._bounds = [int(each) for each in np.searchsorted(part, np.arange(len(KINDS) + 1) * len(layers))]
        """The first line of each kind, and the end of the last."""
        self.part, self.within, self.absent = (
            torch.from_numpy(each).to(device)
            for each in (
                part,
                np.arange(len(part), dtype=np.int32) - starts,
                np.array(ABSENT, np.int32)[part // len(layers)],
            )
        )
        self.scaled_layer = self.part[self._bounds[UP] : self._bounds[OUTER + 1]] % len(layers)
        if layout.factored:
            self.layer, self.number = self.part % len(layers), torch.from_numpy(number).to(device)
        self.bias = torch.zeros(self._length(SLOPE) * FLOATS, dtype=dtype)
        for i in ones(layout.gained):
            bias = layers[i].bias
            if bias is not None:
                self._cut(self.bias, FLOATS, SLOPE, i, len(bias)).copy_(bias)
        self.bias = self.bias.to(device)
        self.length = self._bounds[-1] + 2 * self._length(SLOPE) + self._length(INPUT_SLOPE)
        """The lines of a gathered row and of the gains that are computed from it."""

    def views(self, buffer: Tensor, rows: int) -> RowViews:
        """Return views of a buffer of `rows · length` lines."""
        bounds, rank = self._bounds, self._layout.rank
        lines, computed = buffer.split([rows * bounds[-1], rows * (self.length - bounds[-1])])
        numbers, floats = (lines.view(rows, -1).view(dtype) for dtype in (self._dtype, FLOAT))
        outs, ins = self._length(SLOPE) * FLOATS, self._length(INPUT_SLOPE) * FLOATS
        gains, input_gains, _ = (
            computed.view(-1).view(self._dtype).tensor_split([2 * rows * outs, rows * (2 * outs + ins)])
        )
        gains, input_gains = gains.view(2, rows, outs), input_gains.view(rows, ins)
        changes: dict[int, Change] = {}
        for i in ones(self._layout.touched):
            layer = self._layers[i]
            if (self._layout.straight | ~self._layout.changed) >> i & 1:
                changes[i] = Change(numbers[:, :0], numbers[:, :0])
            else:
                down = self._cut(numbers, self._numbers, DOWN, i, layer.fan_in * layer.down_rank(rank), first=0)
                up = self._cut(numbers, self._numbers, UP, i, layer.fan_out * layer.up_rank(rank), first=0)
                changes[i] = Change(
                    layer.view_down(down, layer.down_rank(rank)), layer.view_up(up, layer.up_rank(rank))
                )
            if self._layout.gained >> i & 1:
                gain, offset = self._cut(gains, FLOATS, SLOPE, i, layer.fan_out)[:, :, None]
                changes[i] = changes[i]._replace(gain=gain, offset=None if layer.bias is None else offset)
            if self._layout.input_gained >> i & 1:
                gain = self._cut(input_gains, FLOATS, INPUT_SLOPE, i, layer.channels)
                changes[i] = changes[i]._replace(input_gain=gain)
        for i, number, shapes, first in sorted(self._layout.factored):
            outer, inner = (
                self._cut(numbers, self._numbers, kind, i, math.prod(shape), first=0, number=number).unflatten(1, shape)
                for kind, shape in zip(FACTORS, shapes, strict=True)
            )
            changes[i] = changes[i]._replace(factors=(*changes[i].factors, Factors(outer, inner, first)))
        return RowViews(
            lines,
            numbers[:, bounds[UP] * self._numbers : bounds[OUTER + 1] * self._numbers].view(rows, -1, self._numbers),
            floats[:, bounds[NORM_0] * FLOATS : bounds[INPUT_SLOPE] * FLOATS].view(rows, len(GAINS), outs),
            gains,
            floats[:, bounds[INPUT_SLOPE] * FLOATS :],
            input_gains,
            changes,
        )

    def as_slots(self, lines: Tensor, rows: int, rank: int) -> tuple[Tensor, ...]:
        """Return the first arguments of `AddLora` by which it reads gathered rows as slots of this rank, unscaled."""
        places = torch.arange(rows, dtype=torch.int32)
        starts = torch.zeros(rows, len(KINDS) * len(self._layers), dtype=torch.int32)
        for (part, _), start in self._starts.items():
            starts[:, part] = places * self._bounds[-1] + start
        ranks = torch.full((rows, len(self._layers)), rank, dtype=torch.int32)
        tables = (starts, ranks, torch.zeros_like(ranks), torch.stack([places, torch.ones(rows).view(torch.int32)]))
        return lines.view(self._dtype).flatten(), *(each.to(lines.device) for each in tables)

    def _part_bytes(self) -> Iterable[tuple[tuple[int, int], int]]:
        """Return the bytes of each part of a gathered row, by part and `Sizes.number` or 0, in order."""
        layout = self._layout
        for kind in KINDS:
            if kind in FACTORS:
                for i, number, shapes, _ in sorted(layout.factored):
                    size = self._dtype.itemsize * math.prod(shapes[kind - OUTER])
                    yield (kind * len(self._layers) + i, number), size
                continue
            gathered = layout.changed & ~layout.straight
            chosen = gathered if kind in (DOWN, UP) else layout.gained if kind in GAINS else layout.input_gained
            for i in ones(chosen):
                layer, item = self._layers[i], self._dtype.itemsize
                size = FLOAT.itemsize * (layer.channels if kind == INPUT_SLOPE else layer.fan_out)
                if kind in (DOWN, UP):
                    down, up = layer.down_rank(layout.rank), layer.up_rank(layout.rank)
                    size = item * (layer.fan_in * down, layer.fan_out * up)[kind]
                yield (kind * len(self._layers) + i, 0), size

    def _length(self, kind: int) -> int:
        return self._bounds[kind + 1] - self._bounds[kind]

    def _cut(
        self, flat: Tensor, unit: int, kind: int, i: int, count: int, *, first: int | None = None, number: int = 0
    ) -> Tensor:
        """Return the numbers of layer i's part, of `unit` a line, where `flat` begins at line `first` or this kind's."""
        line = self._starts[kind * len(self._layers) + i, number] - (self._bounds[kind] if first is None else first)
        return flat[..., line * unit : line * unit + count]


class Lane:
    """One lane's module objects, what is bound to them, and the buffer that it lies in."""

    def __init__(
        self, layers: Mapping[str, LoRALayer], device: torch.device, add_lora: Callable[..., None] | None = None
    ) -> None:
        """`add_lora` is an `AddLora` that lacks its arguments from the rows on."""
        self.rows = torch.zeros(2, 0, dtype=torch.int32, device=device)
        """[2, rows or more]: each row's slot, and the bits of its scale in float32; the same tensor while rows fit."""
        self.buffer = torch.empty(0, WORDS, dtype=WORD, device=device)
        self.bound: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        """The slots and scales that are bound; None where something else is, or slots have changed since."""
        self.moves = 0
        """How often the rows or the buffer had to move."""
        self._layers = [vars(layer) for layer in layers.values()]
        self._add_lora = add_lora
        self._views: dict[tuple[Layout, int], RowViews] = {}
        self._changes: Mapping[int, Change] = {}
        for layer in self._layers:
            layer["change"] = None

    def upload(self, slots: Sequence[int], scales: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return slots and scales of the rows on the device, after one copy."""
        count = len(slots)
        if count > self.rows.shape[1]:
            self._views.clear()
            self.rows, self.moves = self.rows.new_zeros(2, count), self.moves + 1
        both = torch.zeros(self.rows.shape, dtype=torch.int32, pin_memory=self.rows.is_cuda)
        both[:, :count] = torch.from_numpy(np.array([slots, np.array(scales, np.float32).view(np.int32)], np.int32))
        self.rows.copy_(both, non_blocking=True)
        return self.rows[0, :count], self.rows[1, :count].view(torch.float32)

    def views(self, layout: Layout, plan: Plan, rows: int) -> RowViews:
        """Return views of the buffer, which grows where it must and else never moves."""
        if rows * plan.length > len(self.buffer) or len(self._views) >= KEPT_VIEWS:
            self._views.clear()
        if rows * plan.length > len(self.buffer):
            self.buffer, self.moves = self.buffer.new_empty(rows * plan.length, WORDS), self.moves + 1
        if (layout, rows) not in self._views:
            made = plan.views(self.buffer[: rows * plan.length], rows)
            if self._add_lora is not None:
                for i in ones(layout.straight):
                    made.changes[i] = made.changes[i]._replace(add=partial(self._add_lora, self.rows, i))
            self._views[layout, rows] = made
        return self._views[layout, rows]

    def change(self, changes: Mapping[int, Change]) -> None:
        """Set the change of each layer; layers without one cost their base alone."""
        if changes is self._changes:
            return
        for i in self._changes.keys() - changes.keys():
            self._layers[i]["change"] = None
        for i, change in changes.items():
            self._layers[i]["change"] = change
        self._changes = changes


def row_bytes(layers: Iterable[LoRALayer], rank: int, dtype: torch.dtype) -> int:
    """Return bytes of a gathered row in which an adapter of this rank, one of `RANK_BUCKETS`, changes all `layers`."""
    sizes = ((each.fan_in * each.down_rank(rank), each.fan_out * each.up_rank(rank)) for each in layers)
    return LINE_BYTES * sum(line_count(size * dtype.itemsize) for both in sizes for size in both)


def ones(bits: int) -> Iterable[int]:
    """Return the places of a number's ones, the lowest first."""
    return (i for i in range(bits.bit_length()) if bits >> i & 1)
