"""Packs many adapters beside a module, any of them for any row of the next forward pass.

Each slot is one flat row of numbers, so filling it is one copy. `bind` gathers the rows that a batch needs into a
buffer, multiplies each by its scale and gives every layer its views: after that a layer costs two small batched
products more.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.lora_layers import LoRALayer
from serve_app.engine_options import MAX_RANK

RANK_BUCKETS = (8, 16, 32, 64, 128, MAX_RANK)
"""A batch's highest rank is rounded up to one of these: lower ranks are computed beside it, padded with zeros."""
LEAST_SUMMED = 16
"""Ups, over whose rank a sum runs, are padded to this rank: from here on zeros leave a sum's bits alone (measured on
CPU; at 8 they do not), so that ranks may mix in exact mode."""


class Layout(NamedTuple):
    """Offsets of every layer's part in an adapter's flat row, all downs first, every layer at the same rank.

    Never changed, only replaced by one of the next version.
    """

    version: int
    rank: int
    downs: dict[str, int]
    ups: dict[str, int]
    size: int

    @classmethod
    def over(cls, layers: Mapping[str, LoRALayer], names: Iterable[str], rank: int, *, version: int) -> "Layout":
        """Return the layout of those `layers` that `names` has, in the layers' own order."""
        wanted = set(names)
        chosen = [name for name in layers if name in wanted]
        ends = [0]
        downs = [layers[name].fan_in * rank for name in chosen]
        for length in downs + [layers[name].fan_out * summed_rank(rank) for name in chosen]:
            ends.append(ends[-1] + length)
        starts = dict(zip(chosen, ends, strict=False)), dict(zip(chosen, ends[len(chosen) :], strict=False))
        return cls(version, rank, *starts, ends[-1])

    def covers(self, ranks: Mapping[str, int]) -> bool:
        return all(name in self.downs and rank <= self.rank for name, rank in ranks.items())

    @property
    def ups_start(self) -> int:
        return min(self.ups.values(), default=self.size)

    def views(self, name: str, layer: LoRALayer, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return a layer's down and up in flat rows, cut to `rank`: rank is first, so a lower one is a prefix."""
        down, up, summed = self.downs[name], self.ups[name], summed_rank(rank)
        return (
            layer.view_down(rows[:, down : down + layer.fan_in * rank], rank),
            layer.view_up(rows[:, up : up + layer.fan_out * summed], summed),
        )


def summed_rank(rank: int) -> int:
    return max(rank, LEAST_SUMMED)


def bucket_rank(rank: int) -> int:
    return next(bucket for bucket in RANK_BUCKETS if bucket >= rank)


NO_SLOT = 0
"""The slot of zeros, for rows without an adapter and for padding."""


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


def ranks_of(weights: LayerWeights) -> dict[str, int]:
    return {name: part.rank for name, part in weights.items()}


class Contents(NamedTuple):
    """What a slot holds."""

    ranks: dict[str, int]
    """The rank of each layer."""
    dora: frozenset[str] = frozenset()
    """Layers whose gain is by PEFT's DoRA."""
    sloped: frozenset[str] = frozenset()
    """Layers whose gain is linear in the scale."""
    input_sloped: frozenset[str] = frozenset()
    """Layers whose input has a gain."""
    unscaled: frozenset[str] = frozenset()
    """Layers whose BA acts whole at every scale but 0."""


EMPTY = Contents({})


class PackedRow(NamedTuple):
    """An adapter packed for one layout; `AdapterSlots.set` copies it into a slot."""

    version: int
    flat: Tensor
    norms: dict[str, Tensor]
    """Layers with a gain have [4, out]: the three coefficients of ‖W + scale·BA‖² as a polynomial of the scale, and m²;
    or the slope and three rows of zeros."""
    input_slopes: dict[str, Tensor]
    """Layers whose input has a gain have its slope, [in]."""
    contents: Contents

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.flat, *self.norms.values(), *self.input_slopes.values()))


class AdapterSlots:
    """Slots over one module's layers, which cover only layers and ranks that adapters have needed, and grow."""

    def __init__(self, lanes: Sequence[Mapping[str, LoRALayer]], count: int, *, uniform: bool = False) -> None:
        """`lanes` are module objects over the same weights; each keeps what was bound to it, and shares the slots.

        `uniform` binds every layer at full rank for any batch, so that a compiled forward never changes.
        """
        self.lanes = lanes
        self.layers = lanes[0]
        self.count = count
        self._uniform = uniform
        weight = next(iter(self.layers.values())).weight
        self.device, self.dtype = weight.device, weight.dtype
        self.layout = Layout(0, 0, {}, {}, 0)
        self._store = torch.zeros(count, 0, device=self.device, dtype=self.dtype)
        self._contents = [EMPTY] * count
        self._norms: dict[str, Tensor] = {}
        self._input_slopes: dict[str, Tensor] = {}
        self._forget_bound()

    @property
    def size_bytes(self) -> int:
        """Return bytes of all slots, used or not. For any thread."""
        gains = [*self._norms.values(), *self._input_slopes.values()]
        return self._store.nbytes + sum(tensor.nbytes for tensor in gains)

    # -- filling slots ---------------------------------------------------------------------------------------------

    def pack(self, weights: LayerWeights) -> PackedRow | None:
        """Pack `weights` for the present layout, in host memory; None when it does not cover them. For any thread."""
        layout = self.layout
        if not layout.covers(ranks_of(weights)):
            return None
        row = torch.zeros(1, layout.size, dtype=self.dtype)
        for name, part in weights.items():
            down, up = self._views(layout, name, row, part.rank)
            down[0] = self.layers[name].arrange_down(part.down)
            up[0, : part.rank] = (part.up * part.scaling).T
        dora = {
            name: self._norm_coefficients(name, part) for name, part in weights.items() if part.magnitude is not None
        }
        sloped = {
            name: F.pad(part.slope.float()[None], (0, 0, 0, 3))
            for name, part in weights.items()
            if part.slope is not None
        }
        input_slopes = {
            name: part.input_slope.float() for name, part in weights.items() if part.input_slope is not None
        }
        unscaled = frozenset(name for name, part in weights.items() if part.unscaled)
        contents = Contents(ranks_of(weights), frozenset(dora), frozenset(sloped), frozenset(input_slopes), unscaled)
        flat = row[0].pin_memory() if self.device.type == "cuda" else row[0]
        return PackedRow(layout.version, flat, dora | sloped, input_slopes, contents)

    def set(self, slot: int, row: PackedRow) -> None:
        """Copy a row packed for the present layout into a slot."""
        assert row.version == self.layout.version, f"row of layout {row.version}, slots of layout {self.layout.version}"
        self._store[slot].copy_(row.flat, non_blocking=True)
        for held, packed in ((self._norms, row.norms), (self._input_slopes, row.input_slopes)):
            for name, numbers in packed.items():
                if name not in held:
                    held[name] = torch.zeros(self.count, *numbers.shape, device=self.device)
                held[name][slot] = numbers
        self._contents[slot] = row.contents
        self._forget_bound()

    def reset(self, slot: int) -> None:
        """Zero a slot, so that no row can read its old adapter."""
        self._store[slot].zero_()
        self._contents[slot] = EMPTY
        self._forget_bound()

    def grow_layout(self, ranks: Mapping[str, int]) -> Layout:
        """Return a layout that covers layers of these ranks and all that the present one covers."""
        rank = bucket_rank(max([self.layout.rank, *ranks.values()]))
        return self._laid_out({*self.layout.downs, *ranks}, rank)

    def change_layout(self, layout: Layout, count: int) -> None:
        """Change to a grown layout and `count` slots, which keep their contents."""
        old, kept = self.layout, self._store[: min(count, self.count)]
        store = torch.zeros(count, layout.size, device=self.device, dtype=self.dtype)
        for name in old.downs:
            views = zip(
                self._views(layout, name, store[: len(kept)], old.rank),
                self._views(old, name, kept, old.rank),
                strict=True,
            )
            for new, held in views:
                new.copy_(held)
        self.layout, self.count, self._store = layout, count, store
        self._forget_bound()
        self._contents = (self._contents + [EMPTY] * count)[:count]
        self._norms = {name: norms[:count].clone() for name, norms in self._norms.items()}
        self._input_slopes = {name: slopes[:count].clone() for name, slopes in self._input_slopes.items()}

    # -- binding rows ----------------------------------------------------------------------------------------------

    def bind(self, slots: Sequence[int], scales: Sequence[float], *, lane: int = 0) -> None:
        """Apply the adapter of `slots[i]` times `scales[i]` to row i of the lane's next forward pass."""
        rows = (tuple(slots), tuple(scales))
        if rows == self._bound[lane]:
            return
        changed = set[str]().union(*(self._contents[slot].ranks for slot in set(slots)))
        targets = set(self.layout.downs) if self._uniform else changed
        rank = self.layout.rank if self._uniform else self.rank_of(slots)
        gathered = self._gather(slots, scales)
        held = [self._contents[slot] for slot in set(slots)]
        gained = set(self._norms if self._uniform else ()).union(*(each.dora | each.sloped for each in held))
        input_gained = set(self._input_slopes if self._uniform else ()).union(*(each.input_sloped for each in held))
        for name, layer in self.lanes[lane].items():
            if name in targets:
                down, up = self._views(self.layout, name, gathered, rank)
                self._undo_scale(name, up, slots, scales)
                layer.bind(
                    down,
                    up,
                    self._gains(name, slots, scales) if name in gained else None,
                    self._input_gains(name, slots, scales) if name in input_gained else None,
                )
            elif layer.rank:
                layer.unbind()
        self._bound[lane] = rows

    def _forget_bound(self) -> None:
        """Make the next `bind` of every lane read the slots again."""
        self._bound: list[object] = [None] * len(self.lanes)

    def bind_random(self, rows: Sequence[int], max_rows: int, layout: Layout, *, lane: int = 0) -> None:
        """Apply random adapters of the lowest rank to every layer of `layout` until the lane's next `bind`.

        Row i of the pass gets the adapter of number `rows[i]`, below `max_rows`, the same in any company.
        """
        generator = torch.Generator().manual_seed(1)
        flat = torch.zeros(1, layout.size)
        for name in layout.downs:
            for view in self._views(layout, name, flat, RANK_BUCKETS[0]):
                view.copy_(torch.randn(view.shape, generator=generator) * 0.05)
        scales = torch.linspace(0.5, 1.5, max_rows)[list(rows), None]
        stacked = (flat * scales).to(self.device, self.dtype)
        for name, layer in self.lanes[lane].items():
            if name in layout.downs:
                layer.bind(*self._views(layout, name, stacked, layout.rank))
            else:
                layer.unbind()
        self._bound[lane] = None

    @property
    def widest_layout(self) -> Layout:
        """Return every layer an adapter may change, at the lowest rank; the present layout if uniform."""
        return self.layout if self._uniform else self._laid_out(self.layers, RANK_BUCKETS[0])

    def layout_at(self, rank: int) -> Layout:
        """Return the layout of the layers that adapters have changed, at one of `RANK_BUCKETS`."""
        return self._laid_out(self.layout.downs, rank)

    def rank_of(self, slots: Iterable[int]) -> int:
        """Return the rank bucket that the adapters in `slots` need together; 0 when they change nothing here."""
        highest = max((rank for slot in set(slots) for rank in self._contents[slot].ranks.values()), default=0)
        return bucket_rank(highest) if highest else 0

    def _gather(self, slots: Sequence[int], scales: Sequence[float]) -> Tensor:
        rows = self._store.index_select(0, torch.tensor(slots, device=self.device))
        rows[:, self.layout.ups_start :] *= torch.tensor(scales, device=self.device, dtype=self.dtype)[:, None]
        return rows

    def _views(self, layout: Layout, name: str, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return layout.views(name, self.layers[name], rows, rank)

    def _laid_out(self, names: Iterable[str], rank: int) -> Layout:
        return Layout.over(self.layers, names, rank, version=self.layout.version + 1)

    # -- DoRA ------------------------------------------------------------------------------------------------------

    def _norm_coefficients(self, name: str, part: ModuleWeights) -> Tensor:
        assert part.magnitude is not None
        base = self.layers[name].weight.detach().flatten(1).float().cpu()
        change = part.up.float() @ part.down.flatten(1).float() * part.scaling
        return torch.stack(
            [base.square().sum(1), 2 * (base * change).sum(1), change.square().sum(1), part.magnitude.float() ** 2]
        )

    def _gains(self, name: str, slots: Sequence[int], scales: Sequence[float]) -> Tensor:
        """Return the factor of each row's output [rows, out], 1 for rows without a gain."""
        gains = torch.ones(len(slots), self.layers[name].fan_out, device=self.device)
        for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
            if name in self._contents[slot].dora:
                n0, n1, n2, square = self._norms[name][slot]
                gains[row] = (square / (n0 + scale * n1 + scale * scale * n2)).sqrt()
            elif name in self._contents[slot].sloped:
                gains[row] = 1 + scale * self._norms[name][slot][0]
        return gains.to(self.dtype)

    def _input_gains(self, name: str, slots: Sequence[int], scales: Sequence[float]) -> Tensor:
        """Return the factor of each row's input, or of its channels [rows, in], 1 for rows without one."""
        gains = torch.ones(len(slots), self.layers[name].weight.shape[1], device=self.device)
        for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
            if name in self._contents[slot].input_sloped:
                gains[row] = 1 + scale * self._input_slopes[name][slot]
        return gains.to(self.dtype)

    def _undo_scale(self, name: str, up: Tensor, slots: Sequence[int], scales: Sequence[float]) -> None:
        """Take the scale out of the rows whose BA acts whole in this layer."""
        for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
            if scale not in (0, 1) and name in self._contents[slot].unscaled:
                up[row] /= scale
