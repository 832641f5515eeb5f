"""Packs many adapters beside a module, any of them for any row of the next forward pass.

An adapter lies in an `AdapterStore` as it was packed: for each layer `down` and `up` at the layer's own rank, and the
numbers of its gains. Each of these parts begins on a line of its own, and a table on the device says where.

`bind` gathers what a batch's rows need into a row buffer: which line comes where is computed on the device from the
rows' slots, so that a change of company is one small upload and a few launches, however many layers there are. The
layers' views of the buffer are made once for each layout, which is the layers and the rank that some batch needs.

The device's tables, for kernels that read slots themselves, all int32 at fixed addresses and 0 in slot `NO_SLOT`:
`starts` and `sizes` [slots, parts] are a part's first line in the store and how many it has; part `kind · layers + i`
is that of layer i. `ranks` and `unscaled` [slots, layers] are a layer's rank, and whether its BA acts whole. `down`
is [rank, …] as `LoRALayer.arrange_down` orders it and `up` is [rank, out], both in the store's own type.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.adapter_store import LINE_BYTES, ONES, WORD, WORDS, ZEROS, AdapterStore, line_count
from serve_app.engine.lora_layers import Change, LoRALayer
from serve_app.engine_options import MAX_RANK

RANK_BUCKETS = (16, 32, 64, 128, MAX_RANK)
"""A batch's highest rank is rounded up to one of these: lower ranks are computed beside it, padded with zeros. From 16
on the padding leaves a row's bits alone, and a product over 8 takes as long (both measured on CPU; at 8 bits differ).
"""
NO_SLOT = 0
"""The slot without an adapter, for rows that have none and for padding."""
DOWN, UP, NORM_0, NORM_1, NORM_2, SQUARE, SLOPE, INPUT_SLOPE = range(8)
"""The kinds of parts. The output's gain is √(square / (norm_0 + scale·norm_1 + scale²·norm_2)) + scale·slope, where
DoRA's norms are the coefficients of ‖W + scale·BA‖² and square is m²; the input's gain is 1 + scale·input_slope."""
KINDS = 8
GAINS = range(NORM_0, INPUT_SLOPE)
ABSENT = (ZEROS, ZEROS, ONES, ZEROS, ZEROS, ONES, ZEROS, ZEROS)
"""The line that each kind of part consists of where an adapter lacks it: it changes nothing."""
FLOAT_BYTES = torch.float32.itemsize
FLOATS = LINE_BYTES // FLOAT_BYTES
"""A gain's numbers are computed and laid out in float32."""
K, V = TypeVar("K"), TypeVar("V")
KEPT_LAYOUTS = 64
"""The views of so many layouts and row counts are kept."""


class ModuleWeights(NamedTuple):
    """One layer's part of an adapter: the change of its weight is scaling · up @ down."""

    down: Tensor
    """[rank, in] or [rank, in, kernel, kernel]."""
    up: Tensor
    """[out, rank]."""
    scaling: float
    """alpha / rank."""
    magnitude: Tensor | None = None
    """PEFT's DoRA: m [out]; the output's gain is m / ‖W + scale·BA‖."""
    slope: Tensor | None = None
    """[out]; the output's gain is 1 + scale·slope (IA³, LyCORIS' DoRA)."""
    input_slope: Tensor | None = None
    """[in]; the gain of the input, or of its channels, is 1 + scale·input_slope (their other forms)."""
    unscaled: bool = False
    """LyCORIS' DoRA: BA acts whole at every scale but 0, and only the gain follows the scale."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


LayerWeights = Mapping[str, ModuleWeights]
"""An adapter's weights for one module, by layer."""


class Layout(NamedTuple):
    """What gathered rows hold; layers are bits of a number, the first of `AdapterSlots.layers` the lowest."""

    rank: int = 0
    """One of `RANK_BUCKETS`; 0 where no layer changes."""
    changed: int = 0
    gained: int = 0
    """Layers whose output has a gain."""
    input_gained: int = 0
    unscaled: int = 0
    """Layers whose BA acts whole at every scale but 0."""

    def joined(self, other: "Layout") -> "Layout":
        return Layout(max(self.rank, other.rank), *(a | b for a, b in zip(self[1:], other[1:], strict=True)))


NOTHING = Layout()


class PackedRow(NamedTuple):
    """An adapter's numbers for one module, in host memory."""

    lines: Tensor
    table: Tensor
    """Its row of the device's tables, as if `lines` began at 0."""
    layout: Layout


class Plan(NamedTuple):
    """Where the parts of a layout lie in each gathered row, kind by kind, and which lines those are."""

    starts: dict[int, int]
    """Part → its first line of the row."""
    bounds: list[int]
    """The first line of each kind, and the end of the last."""
    part: Tensor
    """[lines] the part that each line belongs to."""
    within: Tensor
    """[lines] the line's place in its part."""
    absent: Tensor
    """[lines] the line that stands in where an adapter lacks this one."""
    bias: Tensor
    """The biases of the layers with a gain, as their gains lie."""

    def length(self, *kinds: int) -> int:
        return sum(self.bounds[kind + 1] - self.bounds[kind] for kind in kinds)


class RowViews(NamedTuple):
    """Views of a row buffer for one layout and number of rows."""

    lines: Tensor
    ups: Tensor
    """[rows, lines, numbers]"""
    norms: Tensor
    """[rows, kinds, numbers] in float32: the numbers that output gains are computed from."""
    gains: Tensor
    """[2, rows, numbers]: gains and offsets of outputs."""
    input_slopes: Tensor
    input_gains: Tensor
    changes: dict[int, Change]
    """Layer → its change."""


class Lane:
    """One lane's module objects, what is bound to them, and the buffer that it lies in."""

    def __init__(self, layers: Mapping[str, LoRALayer], device: torch.device) -> None:
        self.rows = torch.zeros(2, 0, dtype=torch.int32, device=device)
        """[2, rows or more]: each row's slot, and the bits of its scale in float32."""
        self.bound: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        self.buffer = torch.empty(0, WORDS, dtype=WORD, device=device)
        self.views: dict[tuple[Layout, int], RowViews] = {}
        self._layers = [vars(layer) for layer in layers.values()]
        self._changes: Mapping[int, Change] = {}

    def upload(self, slots: Sequence[int], scales: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return slots and scales of the rows on the device."""
        count = len(slots)
        if count > self.rows.shape[1]:
            self.rows = self.rows.new_zeros(2, count)
        both = torch.zeros(self.rows.shape, dtype=torch.int32, pin_memory=self.rows.is_cuda)
        both[:, :count] = torch.from_numpy(np.array([slots, np.array(scales, np.float32).view(np.int32)], np.int32))
        self.rows.copy_(both, non_blocking=True)
        return self.rows[0, :count], self.rows[1, :count].view(torch.float32)

    def lines(self, count: int) -> Tensor:
        """Return so many lines of the buffer, which grows where it must and never moves else."""
        if count > len(self.buffer):
            self.views.clear()
            self.buffer = self.buffer.new_empty(count, WORDS)
        return self.buffer[:count]

    def change(self, changes: Mapping[int, Change]) -> None:
        """Set the change of each layer; layers without one cost their base alone."""
        if changes is not self._changes:
            for i in self._changes.keys() - changes.keys():
                self._layers[i]["change"] = None
            for i, change in changes.items():
                self._layers[i]["change"] = change
            self._changes = changes


class AdapterSlots:
    """Slots over one module's layers. For the step thread alone, but for `pack`."""

    def __init__(
        self, lanes: Sequence[Mapping[str, LoRALayer]], count: int, store: AdapterStore, *, uniform: bool = False
    ) -> None:
        """`lanes` are module objects over the same weights; each keeps what was bound to it, and shares the slots.

        `uniform` binds every layer that any adapter has changed, at the highest rank of all, for any batch, so that a
        compiled forward never changes.
        """
        self.layers = lanes[0]
        self.count = count
        self.store = store
        self.layout = NOTHING
        """What adapters have needed so far, all together."""
        self._uniform = uniform
        self._lanes = [Lane(layers, store.device) for layers in lanes]
        self._layers = list(self.layers.values())
        self._names = {name: i for i, name in enumerate(self.layers)}
        self._slots = [NOTHING] * count
        self._plans: dict[Layout, Plan] = {}
        layers, parts = len(self._layers), KINDS * len(self._layers)
        self._table = torch.empty(count, 2 * parts + 2 * layers, dtype=torch.int32, device=store.device)
        self._table[NO_SLOT] = 0
        self.starts, self.sizes, self.ranks, self.unscaled = self._table.split([parts, parts, layers, layers], dim=1)

    @property
    def size_bytes(self) -> int:
        """Return bytes of the tables and of the rows that batches gather. For any thread."""
        return self._table.nbytes + sum(lane.buffer.nbytes for lane in self._lanes)

    # -- filling slots ---------------------------------------------------------------------------------------------

    def pack(self, weights: LayerWeights) -> PackedRow:
        """Pack `weights` in host memory, page-locked where the device copies from there. For any thread."""
        parts = {part: numbers for name, layer in weights.items() for part, numbers in self._parts(name, layer)}
        sizes = [line_count(numbers.nbytes) for numbers in parts.values()]
        starts = list(accumulate(sizes, initial=0))
        on_gpu = self.store.device.type == "cuda"
        lines = torch.zeros(starts[-1], WORDS, dtype=WORD, pin_memory=on_gpu)
        table = np.zeros(self._table.shape[1], np.int32)
        table_starts, table_sizes, ranks, unscaled = np.split(
            table, np.cumsum([each.shape[1] for each in (self.starts, self.sizes, self.ranks)])
        )
        for (part, numbers), start, size in zip(parts.items(), starts, sizes, strict=False):
            lines[start : start + size].view(numbers.dtype).flatten()[: numbers.numel()] = numbers.flatten()
            table_starts[part], table_sizes[part] = start, size
        for name, layer in weights.items():
            ranks[self._names[name]], unscaled[self._names[name]] = layer.rank, layer.unscaled
        layout = Layout(
            bucket_rank(max(ranks)),
            self._bits(weights),
            self._bits(n for n, layer in weights.items() if layer.magnitude is not None or layer.slope is not None),
            self._bits(name for name, layer in weights.items() if layer.input_slope is not None),
            self._bits(name for name, layer in weights.items() if layer.unscaled),
        )
        return PackedRow(lines, torch.from_numpy(table), layout)

    def set(self, slot: int, row: PackedRow, start: int) -> None:
        """Copy a packed row into the lines of the store that begin at `start`, and let `slot` stand for it."""
        self.store.lines[start : start + len(row.lines)].copy_(row.lines, non_blocking=True)
        table = row.table.clone()
        starts, sizes = table[: self.starts.shape[1]], table[self.starts.shape[1] :][: self.sizes.shape[1]]
        starts += start * (sizes > 0)
        self._table[slot].copy_(table.pin_memory() if self._table.is_cuda else table, non_blocking=True)
        self._replace(slot, row.layout)

    def reset(self, slot: int) -> None:
        """Empty a slot, so that no row can read its old adapter."""
        self._table[slot] = 0
        self._replace(slot, NOTHING)

    def reserve(self, ranks: Mapping[str, int]) -> None:
        """Expect adapters of these ranks, by layer, where every batch is bound alike."""
        self.layout = self.layout.joined(Layout(bucket_rank(max(ranks.values())), self._bits(ranks)))

    def _replace(self, slot: int, layout: Layout) -> None:
        self._slots[slot] = layout
        self.layout = self.layout.joined(layout)
        for lane in self._lanes:
            if lane.bound is not None and slot in lane.bound[0]:
                lane.bound = None

    def _parts(self, name: str, layer: ModuleWeights) -> Iterable[tuple[int, Tensor]]:
        """Return the parts of one layer of an adapter, as the store has them."""
        found = {
            DOWN: self.layers[name].arrange_down(layer.down).to(self.store.dtype),
            UP: (layer.up * layer.scaling).T.to(self.store.dtype),
        }
        if layer.magnitude is not None:
            base = self.layers[name].weight.detach().flatten(1).float().cpu()
            change = layer.up.float() @ layer.down.flatten(1).float() * layer.scaling
            found[NORM_0], found[NORM_1] = base.square().sum(1), 2 * (base * change).sum(1)
            found[NORM_2], found[SQUARE] = change.square().sum(1), layer.magnitude.float() ** 2
        if layer.slope is not None:
            found[SLOPE] = layer.slope.float()
        if layer.input_slope is not None:
            found[INPUT_SLOPE] = layer.input_slope.float()
        return ((kind * len(self._layers) + self._names[name], numbers) for kind, numbers in found.items())

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self._names[name] for name in names)

    # -- binding rows ----------------------------------------------------------------------------------------------

    def bind(self, slots: Sequence[int], scales: Sequence[float], *, lane: int = 0) -> None:
        """Apply the adapter of `slots[i]` times `scales[i]` to row i of the lane's next forward pass."""
        bound, rows = self._lanes[lane], (tuple(slots), tuple(scales))
        if rows == bound.bound:
            return
        layout = self.layout if self._uniform else self._layout_of(slots)
        on_device = bound.upload(slots, scales)
        if layout.changed:
            plan = self._plan(layout)
            views = bound.views.get((layout, len(slots)))
            if views is None:
                buffer = bound.lines(len(slots) * self._lines_a_row(plan))
                views = _kept(bound.views, (layout, len(slots)), self._views(layout, plan, buffer, len(slots)))
            self._gather(layout, plan, views, *on_device)
            bound.change(views.changes)
        else:
            bound.change({})
        bound.bound = rows

    def bind_random(self, rows: int, max_rows: int, layout: Layout, *, lane: int = 0) -> None:
        """Apply random adapters of the lowest rank to every layer of `layout` until the lane's next `bind`.

        Row i gets the same adapter whatever `rows` is, up to `max_rows`.
        """
        generator = torch.Generator().manual_seed(1)
        scales = torch.linspace(0.5, 1.5, max_rows)[:rows, None, None].to(self.store.device, self.store.dtype)
        layout = Layout(layout.rank, layout.changed)
        plan = self._plan(layout)
        buffer = torch.zeros(rows * self._lines_a_row(plan), WORDS, dtype=WORD, device=self.store.device)
        views = self._views(layout, plan, buffer, rows)
        for change in views.changes.values():
            for view in change[:2]:
                part = view[:, : view.shape[1] * RANK_BUCKETS[0] // layout.rank]
                part.copy_(torch.randn(part.shape[1:], generator=generator) * 0.05)
        views.ups.mul_(scales)
        self._lanes[lane].change(views.changes)
        self._lanes[lane].bound = None

    @property
    def widest_layout(self) -> Layout:
        """Return every layer an adapter may change, at the lowest rank; the present layout if uniform."""
        return self.layout if self._uniform else Layout(RANK_BUCKETS[0], self._bits(self.layers))

    @property
    def lowest_layout(self) -> Layout:
        """Return the layout of the layers that adapters have changed, at the lowest rank."""
        return self.layout._replace(rank=RANK_BUCKETS[0])

    def rank_of(self, slots: Iterable[int]) -> int:
        """Return the rank bucket that the adapters in `slots` need together; 0 when they change nothing here."""
        return self._layout_of(slots).rank

    def _layout_of(self, slots: Iterable[int]) -> Layout:
        return reduce(Layout.joined, {self._slots[slot] for slot in slots})

    def _gather(self, layout: Layout, plan: Plan, views: RowViews, slots: Tensor, scales: Tensor) -> None:
        """Copy the rows' lines from the store, scale them, and compute their gains."""
        starts, sizes, _, unscaled = self._table.index_select(0, slots).split(
            [each.shape[1] for each in (self.starts, self.sizes, self.ranks, self.unscaled)], dim=1
        )
        is_there = plan.within < sizes.index_select(1, plan.part)
        index = torch.where(is_there, starts.index_select(1, plan.part) + plan.within, plan.absent)
        torch.index_select(self.store.lines, 0, index.flatten(), out=views.lines)
        factors = scales[:, None]
        if layout.unscaled:
            of_line = plan.part[plan.bounds[UP] : plan.bounds[UP + 1]] - len(self._layers)
            factors = torch.where(unscaled.index_select(1, of_line) > 0, (factors != 0).float(), factors)
        views.ups.mul_(factors[:, :, None].to(self.store.dtype))
        if layout.gained:
            norm_0, norm_1, norm_2, square, slope = views.norms.unbind(1)
            scale = scales[:, None]
            gain = (square / (norm_0 + scale * norm_1 + scale * scale * norm_2)).sqrt() + scale * slope
            gains, offsets = views.gains
            gains.copy_(gain)
            # An offset turns (y - bias)·gain + bias into y·gain + offset. At a gain of 1 it is -0, the one number that
            # changes no bit: a row without a gain must not notice that it stands beside one with.
            torch.mul(plan.bias, 1 - gains, out=offsets).masked_fill_(gains == 1, -0.0)
        if layout.input_gained:
            views.input_gains.copy_(1 + scales[:, None] * views.input_slopes)

    # -- layouts ---------------------------------------------------------------------------------------------------

    def _plan(self, layout: Layout) -> Plan:
        return self._plans.get(layout) or _kept(self._plans, layout, self._make_plan(layout))

    def _make_plan(self, layout: Layout) -> Plan:
        sizes: dict[int, int] = {}
        for kind in range(KINDS):
            chosen = layout.changed if kind in (DOWN, UP) else layout.gained if kind in GAINS else layout.input_gained
            of_rank = layout.rank * self.store.dtype.itemsize if kind in (DOWN, UP) else FLOAT_BYTES
            for i in _ones(chosen):
                layer = self._layers[i]
                numbers = layer.fan_in if kind == DOWN else layer.channels if kind == INPUT_SLOPE else layer.fan_out
                sizes[kind * len(self._layers) + i] = line_count(numbers * of_rank)
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        part, start = (np.repeat(np.array([*each], np.int32), [*sizes.values()]) for each in (sizes, starts.values()))
        bounds = [int(each) for each in np.searchsorted(part, np.arange(KINDS + 1) * len(self._layers))]
        within, absent = (
            np.arange(len(part), dtype=np.int32) - start,
            np.array(ABSENT, np.int32)[part // len(self._layers)],
        )
        on_device = (torch.from_numpy(each).to(self.store.device) for each in (part, within, absent))
        bias = torch.zeros((bounds[SLOPE + 1] - bounds[SLOPE]) * FLOATS, dtype=self.store.dtype)
        for i in _ones(layout.gained):
            numbers = self._layers[i].bias
            if numbers is not None:
                at = (starts[SLOPE * len(self._layers) + i] - bounds[SLOPE]) * FLOATS
                bias[at : at + len(numbers)] = numbers
        return Plan(starts, bounds, *on_device, bias.to(self.store.device))

    def _lines_a_row(self, plan: Plan) -> int:
        """Return the lines of a gathered row and of the gains that are computed from it."""
        return plan.bounds[-1] + 2 * plan.length(SLOPE) + plan.length(INPUT_SLOPE)

    def _views(self, layout: Layout, plan: Plan, buffer: Tensor, rows: int) -> RowViews:
        lines, outputs = buffer.split([rows * plan.bounds[-1], len(buffer) - rows * plan.bounds[-1]])
        words = lines.view(rows, plan.bounds[-1] * WORDS)
        numbers, floats = words.view(self.store.dtype), words.view(torch.float32)
        each = LINE_BYTES // self.store.dtype.itemsize
        bounds, outs, ins = plan.bounds, plan.length(SLOPE) * FLOATS, plan.length(INPUT_SLOPE) * FLOATS
        gained = outputs.flatten().view(self.store.dtype)
        gains, input_gains = gained[: 2 * rows * outs].view(2, rows, outs), gained[2 * rows * outs :][: rows * ins]
        input_gains = input_gains.view(rows, ins)

        def cut(flat: Tensor, unit: int, kind: int, i: int, count: int, first: int = 0) -> Tensor:
            start = (plan.starts[kind * len(self._layers) + i] - first) * unit
            return flat[:, start : start + count]

        changes: dict[int, Change] = {}
        for i in _ones(layout.changed):
            layer = self._layers[i]
            down = cut(numbers, each, DOWN, i, layer.fan_in * layout.rank)
            up = cut(numbers, each, UP, i, layer.fan_out * layout.rank)
            change = Change(layer.view_down(down, layout.rank), layer.view_up(up, layout.rank))
            if layout.gained >> i & 1:
                gain, offset = (cut(one, FLOATS, SLOPE, i, layer.fan_out, bounds[SLOPE])[:, None] for one in gains)
                change = change._replace(gain=gain, offset=None if layer.bias is None else offset)
            if layout.input_gained >> i & 1:
                gain = cut(input_gains, FLOATS, INPUT_SLOPE, i, layer.channels, bounds[INPUT_SLOPE])
                change = change._replace(input_gain=gain)
            changes[i] = change
        return RowViews(
            lines,
            numbers[:, bounds[UP] * each : bounds[UP + 1] * each].view(rows, plan.length(UP), each),
            floats[:, bounds[NORM_0] * FLOATS : bounds[SLOPE + 1] * FLOATS].view(rows, len(GAINS), outs),
            gains,
            floats[:, bounds[INPUT_SLOPE] * FLOATS :],
            input_gains,
            changes,
        )


def bucket_rank(rank: int) -> int:
    return next(bucket for bucket in RANK_BUCKETS if bucket >= rank)


def _ones(bits: int) -> Iterable[int]:
    """Return the places of a number's ones, the lowest first."""
    return (i for i in range(bits.bit_length()) if bits >> i & 1)


def _kept(cache: dict[K, V], key: K, value: V) -> V:
    """Keep a value; of many nobody knows which are used again, so that all are made again."""
    if len(cache) >= KEPT_LAYOUTS:
        cache.clear()
    cache[key] = value
    return value
