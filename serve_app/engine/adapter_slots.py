"""Packs many adapters next to a module; each row of the next forward pass may take any of them.

An adapter lies in an `AdapterStore` as it was packed: for each layer `down` and `up` at the layer's own rank, LoKr's
two factors, and the numbers of its gains. Each of these parts begins on a line of its own, and a table on the device
says where.

`bind` gathers what a batch's rows need into a row buffer: which line comes where is computed on the device from the
rows' slots, so that a change of company is one small upload and a few launches, however many layers there are. The
layers' views of the buffer are made once for each layout, which is the layers and the rank that some batch needs.

The device's tables, for kernels that read slots themselves, all int32 at fixed addresses and 0 in slot `NO_SLOT`:
`starts` and `sizes` [slots, parts] are a part's first line in the store and how many it has; part `kind · layers + i`
is that of layer i. `ranks` and `unscaled` [slots, layers] are a layer's rank, and whether its BA acts whole. `down`
is [rank, …] as `LoRALayer.arrange_down` orders it and `up` is [rank, out], both in the store's own type.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import accumulate
from itertools import count as count_from
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.adapter_store import LINE_BYTES, RESERVED, WORD, WORDS, AdapterStore, line_count
from serve_app.engine.gathered_rows import (
    DOWN,
    INNER,
    INPUT_SLOPE,
    KINDS,
    NORM_0,
    NORM_1,
    NORM_2,
    OUTER,
    RANK_BUCKETS,
    SLOPE,
    SQUARE,
    UP,
    AddLora,
    Lane,
    Layout,
    Plan,
    RowViews,
    Sizes,
    ones,
)
from serve_app.engine.lora_layers import FACTORS_RANK, Factors, LoRAConv, LoRALayer, LoRALinear

NO_SLOT = 0
"""The slot without an adapter, for rows that have none and for padding."""
KEPT_PLANS = 64
"""How many layouts' plans are kept."""


class ModuleWeights(NamedTuple):
    """One layer's part of an adapter: the change of its weight is scaling · (up @ down + outer ⊗ inner)."""

    down: Tensor
    """[rank, in] or [rank, in, kernel, kernel]; rank 0 where there are factors alone."""
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
    factors: Factors | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def change(self) -> Tensor:
        """Return the change of the weight in float32, [out, in…]."""
        change = self.up.float() @ self.down.float().flatten(1)
        if self.factors is not None:
            change += self.factors.whole(len(change))
        return (change * self.scaling).view(-1, *self.down.shape[1:])

    @property
    def size_bytes(self) -> int:
        factors = () if self.factors is None else (self.factors.outer, self.factors.inner)
        return sum(each.nbytes for each in (self.down, self.up, *factors))

    @property
    def size_rank(self) -> int:
        """Return the rank of a LoRA of this layer that has as many numbers."""
        numbers = 0 if self.factors is None else self.factors.outer.numel() + self.factors.inner.numel()
        return self.rank + -(-numbers // self._sides)

    @property
    def work_rank(self) -> int:
        """Return the rank of a LoRA of this layer that takes about as long."""
        return self.rank + (0 if self.factors is None else FACTORS_RANK + -(-self.factors.work // self._sides))

    @property
    def _sides(self) -> int:
        return self.up.shape[0] + self.down.shape[1:].numel()

    def to(self, dtype: torch.dtype) -> "ModuleWeights":
        """Return the change in numbers of this type; gains stay as they are."""
        factors = self.factors
        if factors is not None:
            factors = factors._replace(outer=factors.outer.to(dtype), inner=factors.inner.to(dtype))
        return self._replace(down=self.down.to(dtype), up=self.up.to(dtype), factors=factors)

    def outputs(self, first: int, end: int) -> "ModuleWeights":
        """Return the change of some of the layer's outputs."""
        magnitude, slope = (None if each is None else each[first:end] for each in (self.magnitude, self.slope))
        factors = None if self.factors is None else self.factors.outputs(first, end)
        return self._replace(up=self.up[first:end], magnitude=magnitude, slope=slope, factors=factors)


LayerWeights = Mapping[str, ModuleWeights]
"""An adapter's weights for one module, by layer."""


NOTHING = Layout()


class PackedRow(NamedTuple):
    """An adapter's numbers for one module, in host memory."""

    lines: Tensor
    table: Tensor
    """Its row of the device's tables, as if `lines` began at 0."""
    layout: Layout


class AdapterSlots:
    """Slots over one module's layers. Only the step thread may use them, except for `pack` and `size_bytes`."""

    def __init__(
        self,
        lanes: Sequence[Mapping[str, LoRALayer]],
        count: int,
        store: AdapterStore,
        *,
        add_lora: AddLora | None = None,
    ) -> None:
        """`lanes` are module objects over the same weights; each keeps what was bound to it, and shares the slots.

        With `add_lora` linear layers read the slots themselves: nothing is gathered for them, and every batch binds all
        of them that adapters have changed, so that few captured graphs serve all.
        """
        self.layers = lanes[0]
        self.count = count
        self.store = store
        self.layout = NOTHING
        """The layout that all adapters so far need together."""
        self._keys: list[Hashable] = [None] * len(lanes)
        self._layers = list(self.layers.values())
        self._convolutions, self._apart = [layer for layer in self._layers if isinstance(layer, LoRAConv)], False
        self.names = {name: i for i, name in enumerate(self.layers)}
        """Layer → its place in tables and layouts."""
        is_read = {
            name for name, layer in self.layers.items() if add_lora is not None and isinstance(layer, LoRALinear)
        }
        self._straight = self._bits(is_read)
        self._add_lora = add_lora
        self._slots = [NOTHING] * count
        self._plans: dict[Layout, Plan] = {}
        self._noise: tuple[Layout, list[Tensor]] = NOTHING, []
        """The layout that random adapters were last bound by, and their numbers, until others are bound."""
        layers, parts = len(self._layers), len(KINDS) * len(self._layers)
        self._columns = [parts, parts, layers, layers, layers]
        self._table = torch.empty(count, sum(self._columns), dtype=torch.int32, device=store.device)
        self._table[NO_SLOT] = 0
        self.starts, self.sizes, self.ranks, self.unscaled, _ = self._table.split(self._columns, dim=1)
        self._sizes: dict[Hashable, int] = {}
        """The number by which the device knows each combination of factors' sizes that has occurred."""
        self._next_number = count_from(1)
        tables = (store.numbers, self.starts, self.ranks, self.unscaled)
        read = None if add_lora is None else partial(add_lora, *tables)
        self._lanes = [Lane(layers, store.device, read) for layers in lanes]

    @property
    def size_bytes(self) -> int:
        """Return bytes of the tables and of the rows that batches gather. Any thread may ask."""
        return self._table.nbytes + sum(lane.buffer.nbytes for lane in self._lanes)

    # -- filling slots ---------------------------------------------------------------------------------------------

    def pack(self, weights: LayerWeights) -> PackedRow:
        """Pack `weights` in host memory, page-locked where the device copies from there. Any thread may."""
        parts = {part: numbers for name, layer in weights.items() for part, numbers in self._parts(name, layer)}
        sizes = [line_count(numbers.nbytes) for numbers in parts.values()]
        starts = list(accumulate(sizes, initial=0))
        on_gpu = self.store.device.type == "cuda"
        lines = torch.zeros(starts[-1], WORDS, dtype=WORD, pin_memory=on_gpu)
        table = np.zeros(self._table.shape[1], np.int32)
        table_starts, table_sizes, ranks, unscaled, numbers_of = np.split(table, np.cumsum(self._columns)[:-1])
        for (part, numbers), start, size in zip(parts.items(), starts, sizes, strict=False):
            lines[start : start + size].view(numbers.dtype).flatten()[: numbers.numel()] = numbers.flatten()
            table_starts[part], table_sizes[part] = start, size
        for name, layer in weights.items():
            ranks[self.names[name]], unscaled[self.names[name]] = layer.rank, layer.unscaled
        factored = [self._sizes_of(name, layer.factors) for name, layer in weights.items() if layer.factors is not None]
        for sizes in factored:
            numbers_of[sizes.layer] = sizes.number
        layout = Layout(
            bucket_rank(max(ranks)) if weights else 0,
            self._bits(name for name, layer in weights.items() if layer.rank),
            self._bits(n for n, layer in weights.items() if layer.magnitude is not None or layer.slope is not None),
            self._bits(name for name, layer in weights.items() if layer.input_slope is not None),
            self._bits(name for name, layer in weights.items() if layer.unscaled),
            factored=frozenset(factored),
        )
        return PackedRow(lines, torch.from_numpy(table), layout)

    def set(self, slot: int, row: PackedRow, start: int) -> None:
        """Copy a packed row into the lines of the store that begin at `start`, and let `slot` stand for it."""
        self.store.write(start, row.lines)
        self.assign(slot, row, start)

    def assign(self, slot: int, row: PackedRow, start: int) -> None:
        """Let `slot` stand for a packed row whose lines in the store begin at `start`."""
        table = row.table.clone()
        starts, sizes = table[: self.starts.shape[1]], table[self.starts.shape[1] :][: self.sizes.shape[1]]
        starts += start * (sizes > 0)
        self._table[slot].copy_(table.pin_memory() if self._table.is_cuda else table, non_blocking=True)
        self._slots[slot] = row.layout
        self.layout = self.layout.joined(row.layout)
        for lane in self._lanes:
            if lane.bound is not None and slot in lane.bound[0]:
                lane.bound = None

    def _parts(self, name: str, layer: ModuleWeights) -> Iterable[tuple[int, Tensor]]:
        """Return the parts of one layer of an adapter, as the store has them."""
        found: dict[int, Tensor] = {}
        if layer.rank:
            found[DOWN] = self.layers[name].arrange_down(layer.down).to(self.store.dtype)
            found[UP] = (layer.up * layer.scaling).T.to(self.store.dtype)
        if layer.factors is not None:
            assert isinstance(self.layers[name], LoRALinear), "a convolution's factors are not applied"
            found[OUTER] = (layer.factors.outer * layer.scaling).to(self.store.dtype)
            found[INNER] = layer.factors.inner.to(self.store.dtype)
        if layer.magnitude is not None:
            base = self.layers[name].weight.detach().flatten(1).float().cpu()
            change = layer.change.flatten(1)
            found[NORM_0], found[NORM_1] = base.square().sum(1), 2 * (base * change).sum(1)
            found[NORM_2], found[SQUARE] = change.square().sum(1), layer.magnitude.float() ** 2
        if layer.slope is not None:
            found[SLOPE] = layer.slope.float()
        if layer.input_slope is not None:
            found[INPUT_SLOPE] = layer.input_slope.float()
        return ((kind * len(self._layers) + self.names[name], numbers) for kind, numbers in found.items())

    def _sizes_of(self, name: str, factors: Factors) -> Sizes:
        (a, b), (c, d) = factors.outer.shape, factors.inner.shape
        number = self._sizes.setdefault((a, b, c, d, factors.first), next(self._next_number))  # several threads pack
        return Sizes(self.names[name], number, ((a, b), (c, d)), factors.first)

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self.names[name] for name in names)

    # -- binding rows ----------------------------------------------------------------------------------------------

    def bind(self, slots: Sequence[int], scales: Sequence[float], *, lane: int = 0) -> None:
        """Apply the adapter of `slots[i]` times `scales[i]` to row i of the lane's next forward pass."""
        bound, rows = self._lanes[lane], (tuple(slots), tuple(scales))
        if rows == bound.bound:
            return
        self._noise = NOTHING, []
        layout = self._layout_to_bind(slots)
        on_device = bound.upload(slots, scales)
        if layout.touched:
            views = bound.views(layout, self._plan(layout), len(slots))
            if len(views.lines):
                self._gather(layout, views, *on_device)
            bound.change(views.changes)
        else:
            bound.change({})
        bound.bound = rows
        self._keys[lane] = (layout, len(slots), bound.moves)

    def convolve(self, *, strided_apart: bool) -> None:
        """Let convolutions of the first lane that have strides take one row at a time in the passes that follow."""
        for layer in self._convolutions if strided_apart != self._apart else ():
            layer.strided_apart = strided_apart
        self._apart = strided_apart

    def key(self, lane: int = 0) -> Hashable:
        """Return what tells whether a forward pass of the lane runs the same operators on the same addresses again.

        None where random adapters are bound.
        """
        return self._keys[lane]

    def bind_random(self, rows: Sequence[int], max_rows: int, layout: Layout, *, lane: int = 0) -> None:
        """Apply random adapters of the lowest rank to every layer of `layout` until the lane's next `bind`.

        Row i of the pass gets the adapter of number `rows[i]`, below `max_rows`, the same in any company.
        """
        scales = torch.linspace(0.5, 1.5, max_rows)[list(rows), None, None].to(self.store.device, self.store.dtype)
        layout = Layout(layout.rank, layout.changed, factored=layout.factored)
        plan = self._plan(layout)
        views = plan.views(torch.zeros(len(rows) * plan.length, WORDS, dtype=WORD, device=self.store.device), len(rows))
        parts: list[Tensor] = []
        for i, change in views.changes.items():
            ranks = self._layers[i].down_rank(layout.rank), self._layers[i].up_rank(layout.rank)
            for view, rank in zip((change.down, change.up), ranks, strict=True):
                parts.append(view[:, : view.shape[1] * RANK_BUCKETS[0] // rank])
            parts += [each for factors in change.factors for each in (factors.outer, factors.inner)]
        if self._noise[0] != layout:
            generator = torch.Generator().manual_seed(1)
            drawn = [torch.randn(part.shape[1:], generator=generator) * 0.05 for part in parts]
            self._noise = layout, [noise.to(self.store.device, self.store.dtype) for noise in drawn]
        for part, noise in zip(parts, self._noise[1], strict=True):
            part.copy_(noise)
        views.ups.mul_(scales)
        if self._add_lora is not None:
            read = partial(self._add_lora, *plan.as_slots(views.lines, len(rows), RANK_BUCKETS[0]))
            for i in ones(layout.changed & self._straight):
                views.changes[i] = views.changes[i]._replace(add=partial(read, i))
        self._lanes[lane].change(views.changes)
        self._lanes[lane].bound = self._keys[lane] = None

    @property
    def widest_layout(self) -> Layout:
        """Return every layer an adapter may change, at the lowest rank."""
        return Layout(RANK_BUCKETS[0], self._bits(self.layers))

    def layout_at(self, rank: int) -> Layout:
        """Return the layout of the layers that adapters have changed, at one of `RANK_BUCKETS`."""
        return self.layout._replace(rank=rank)

    def rank_of(self, slots: Iterable[int]) -> int:
        """Return the rank bucket that the adapters in `slots` need together; 0 when they change nothing here."""
        return self._layout_of(slots).rank

    def factored(self, slot: int) -> frozenset[Sizes]:
        """Return the sizes of the factors that the adapter in a slot has here."""
        return self._slots[slot].factored

    def _layout_of(self, slots: Iterable[int]) -> Layout:
        return reduce(Layout.joined, {self._slots[slot] for slot in slots})

    def _layout_to_bind(self, slots: Iterable[int]) -> Layout:
        layout = self._layout_of(slots)
        straight = self.layout.changed & self._straight
        changed = layout.changed | straight
        return layout._replace(rank=layout.rank if changed & ~straight else 0, changed=changed, straight=straight)

    def _gather(self, layout: Layout, views: RowViews, slots: Tensor, scales: Tensor) -> None:
        """Copy the rows' lines from the store, scale them, and compute their gains."""
        plan = self._plan(layout)
        starts, sizes, _, unscaled, numbers = self._table.index_select(0, slots).split(self._columns, dim=1)
        is_there = plan.within < sizes.index_select(1, plan.part)
        if layout.factored:
            is_there &= (plan.number == 0) | (plan.number == numbers.index_select(1, plan.layer))
        index = torch.where(is_there, starts.index_select(1, plan.part) + plan.within, plan.absent)
        torch.index_select(self.store.lines, 0, index.flatten(), out=views.lines)
        factors = scales[:, None]
        if layout.unscaled:
            factors = torch.where(unscaled.index_select(1, plan.scaled_layer) > 0, (factors != 0).float(), factors)
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

    def _plan(self, layout: Layout) -> Plan:
        if layout not in self._plans:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            self._plans[layout] = Plan(layout, self._layers, self.store.device, self.store.dtype)
        return self._plans[layout]


def bucket_rank(rank: int) -> int:
    return next(bucket for bucket in (0, *RANK_BUCKETS) if bucket >= rank)


def bind_alone(layers: Mapping[str, LoRALayer], weights: LayerWeights, scale: float) -> None:
    """Apply one adapter to a module, or none, for forward passes of a single row."""
    weight = next(iter(layers.values())).weight
    alone = AdapterSlots([layers], 2, AdapterStore(weight.device, weight.dtype, 0))
    row = alone.pack(weights)
    alone.store = AdapterStore(weight.device, weight.dtype, row.lines.nbytes + RESERVED * LINE_BYTES)
    alone.set(1, row, RESERVED)
    alone.bind([1], [scale])
