"""Adapter slots: many adapters packed beside a module, any of them on any row of the next forward pass.

Each slot is one flat row of numbers, so filling it is one copy. `bind` gathers the rows a batch needs into a buffer, folds
each row's weight in, and hands every layer its views: after that a layer pays two small batched products and nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serve_app.engine.layers import SlotLayer
from serve_app.engine.layout import RANK_BUCKETS, Layout, bucket_rank

NO_SLOT = 0
"""The slot of zeros, for rows without an adapter and for padding."""


class ModuleWeights(NamedTuple):
    """One layer's adapter: the change of its weight is scale · up @ down."""

    down: Tensor
    """[rank, in] or [rank, in, kernel, kernel]."""
    up: Tensor
    """[out, rank]."""
    scale: float
    """alpha / rank."""
    magnitude: Tensor | None = None
    """DoRA's m, [out]."""

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
    """By layer."""
    dora: frozenset[str]
    """Layers whose output has a gain."""


EMPTY = Contents({}, frozenset())


class PackedRow(NamedTuple):
    """An adapter made ready for one layout of a bank: `put` takes it in one copy."""

    version: int
    flat: Tensor
    norms: dict[str, Tensor]
    """For DoRA layers [4, out]: the three coefficients of ‖W + s·BA‖² as a polynomial of s, and m²."""
    contents: Contents


class SlotBank:
    """Slots over one module's layers. It holds only layers and ranks that adapters have asked for, and grows on demand."""

    def __init__(self, layers: Mapping[str, SlotLayer], slots: int, *, uniform: bool = False) -> None:
        """`uniform` binds every layer at the full rank whatever the batch wears, so that a compiled forward never changes."""
        self.layers = layers
        self._uniform = uniform
        self.slots = slots
        weight = next(iter(layers.values())).weight
        self.device, self.dtype = weight.device, weight.dtype
        self.layout = Layout(0, 0, {}, {}, 0)
        self._store = torch.zeros(slots, 0, device=self.device, dtype=self.dtype)
        self._contents = [EMPTY] * slots
        self._norms: dict[str, Tensor] = {}
        self._bound: object = None

    # -- filling slots ---------------------------------------------------------------------------------------------

    def pack(self, weights: LayerWeights) -> PackedRow | None:
        """`weights` ready for the present layout, in host memory; None when it does not cover them. For any thread."""
        layout = self.layout
        if not layout.covers(ranks_of(weights)):
            return None
        row = torch.zeros(1, layout.size, dtype=self.dtype)
        for name, part in weights.items():
            down, up = self._views(layout, name, row, part.rank)
            down[0] = self.layers[name].arrange_down(part.down)
            up[0, : part.rank] = (part.up * part.scale).T
        norms = {
            name: self._norm_coefficients(name, part) for name, part in weights.items() if part.magnitude is not None
        }
        contents = Contents(ranks_of(weights), frozenset(norms))
        flat = row[0].pin_memory() if self.device.type == "cuda" else row[0]
        return PackedRow(layout.version, flat, norms, contents)

    def put(self, slot: int, row: PackedRow) -> None:
        """Fills a slot with a row packed for the present layout."""
        assert row.version == self.layout.version, f"row of layout {row.version}, bank of layout {self.layout.version}"
        self._store[slot].copy_(row.flat, non_blocking=True)
        for name, norms in row.norms.items():
            if name not in self._norms:
                self._norms[name] = torch.zeros(self.slots, *norms.shape, device=self.device)
            self._norms[name][slot] = norms
        self._contents[slot] = row.contents
        self._bound = None

    def clear(self, slot: int) -> None:
        """Forgets a slot's adapter, so that no row can read it by mistake."""
        self._store[slot].zero_()
        self._contents[slot] = EMPTY
        self._bound = None

    def grown(self, ranks: Mapping[str, int]) -> Layout:
        """The layout that covers layers of these ranks beside what the present one covers."""
        rank = bucket_rank(max([self.layout.rank, *ranks.values()]))
        return self._laid_out({*self.layout.downs, *ranks}, rank)

    def change_layout(self, layout: Layout, slots: int) -> None:
        """Takes a grown layout and so many slots; what those slots hold stays."""
        old, kept = self.layout, self._store[: min(slots, self.slots)]
        store = torch.zeros(slots, layout.size, device=self.device, dtype=self.dtype)
        for name in old.downs:
            views = zip(
                self._views(layout, name, store[: len(kept)], old.rank),
                self._views(old, name, kept, old.rank),
                strict=True,
            )
            for new, held in views:
                new.copy_(held)
        self.layout, self.slots, self._store, self._bound = layout, slots, store, None
        self._contents = (self._contents + [EMPTY] * slots)[:slots]
        self._norms = {name: norms[:slots] for name, norms in self._norms.items()}

    # -- binding rows ----------------------------------------------------------------------------------------------

    def bind(self, slots: Sequence[int], weights: Sequence[float]) -> None:
        """Row i of the next forward pass wears the adapter of `slots[i]` times `weights[i]`."""
        wanted = (tuple(slots), tuple(weights))
        if wanted == self._bound:
            return
        worn = set[str]().union(*(self._contents[slot].ranks for slot in set(slots)))
        targets = set(self.layout.downs) if self._uniform else worn
        rank = self.layout.rank if self._uniform else self.rank_of(slots)
        rows = self._gather(slots, weights)
        for name, layer in self.layers.items():
            if name in targets:
                down, up = self._views(self.layout, name, rows, rank)
                layer.bind(down, up, self._gains(name, slots, weights))
            elif layer.rank:
                layer.unbind()
        self._bound = wanted

    def bind_noise(self, rows: int, max_rows: int, layout: Layout) -> None:
        """Random adapters of the lowest rank on every row and layer of `layout`, computed at its rank; the first `rows` of
        `max_rows`. For measuring: the next `bind` replaces them."""
        generator = torch.Generator().manual_seed(1)
        flat = torch.zeros(1, layout.size)
        for name in layout.downs:
            for view in self._views(layout, name, flat, RANK_BUCKETS[0]):
                view.copy_(torch.randn(view.shape, generator=generator) * 0.05)
        strengths = torch.linspace(0.5, 1.5, max_rows)[:rows, None]
        stacked = (flat * strengths).to(self.device, self.dtype)
        for name, layer in self.layers.items():
            if name in layout.downs:
                layer.bind(*self._views(layout, name, stacked, layout.rank), None)
            else:
                layer.unbind()
        self._bound = None

    @property
    def widest_layout(self) -> Layout:
        """Every layer that an adapter may change, at the lowest rank; where batches are all bound alike, the present layout."""
        return self.layout if self._uniform else self._laid_out(self.layers, RANK_BUCKETS[0])

    @property
    def lowest_layout(self) -> Layout:
        """The present layers at the lowest rank."""
        return self._laid_out(self.layout.downs, RANK_BUCKETS[0])

    def rank_of(self, slots: Iterable[int]) -> int:
        """The rank bucket that the adapters in `slots` need together; 0 when they change nothing here."""
        highest = max((rank for slot in set(slots) for rank in self._contents[slot].ranks.values()), default=0)
        return bucket_rank(highest) if highest else 0

    def _gather(self, slots: Sequence[int], weights: Sequence[float]) -> Tensor:
        rows = self._store.index_select(0, torch.tensor(slots, device=self.device))
        rows[:, self.layout.ups_start :] *= torch.tensor(weights, device=self.device, dtype=self.dtype)[:, None]
        return rows

    def _views(self, layout: Layout, name: str, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return layout.views(name, self.layers[name], rows, rank)

    def _laid_out(self, names: Iterable[str], rank: int) -> Layout:
        return Layout.over(self.layers, names, rank, version=self.layout.version + 1)

    # -- DoRA ------------------------------------------------------------------------------------------------------

    def _norm_coefficients(self, name: str, part: ModuleWeights) -> Tensor:
        assert part.magnitude is not None
        base = self.layers[name].weight.detach().flatten(1).float().cpu()
        change = part.up.float() @ part.down.flatten(1).float() * part.scale
        return torch.stack(
            [base.square().sum(1), 2 * (base * change).sum(1), change.square().sum(1), part.magnitude.float() ** 2]
        )

    def _gains(self, name: str, slots: Sequence[int], weights: Sequence[float]) -> Tensor | None:
        """m / ‖W + s·BA‖ for each row [rows, out], one for rows without DoRA; None when no row has it."""
        has_dora = any(name in self._contents[slot].dora for slot in slots)
        if not has_dora and not (self._uniform and name in self._norms):
            return None
        gains = torch.ones(len(slots), self.layers[name].fan_out, device=self.device)
        for row, (slot, s) in enumerate(zip(slots, weights, strict=True)):
            if name in self._contents[slot].dora:
                n0, n1, n2, square = self._norms[name][slot]
                gains[row] = (square / (n0 + s * n1 + s * s * n2)).sqrt()
        return gains.to(self.dtype)
