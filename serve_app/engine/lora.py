"""Layers that add a different LoRA adapter to every row of a batch.

A `SlotBank` wraps a module's linear and convolution layers once. Adapters lie packed in `slots`, one flat row each; before a
forward pass `bind` copies the rows a batch needs into one buffer and folds each row's weight in, so that a layer pays two
batched matrix products and nothing else: y = base(x) + (x·A)·B. A layer that no adapter of the batch touches pays nothing.
DoRA (Liu et al. 2024) multiplies the output by m / ‖W + s·BA‖, a gain per output and row that `bind` computes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NO_SLOT = 0
"""The slot of zeros, for rows without an adapter and for padding."""
RANK_BUCKETS = (8, 16, 32, 64, 128, 256)


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


def bucket_rank(rank: int) -> int:
    return next(bucket for bucket in RANK_BUCKETS if bucket >= rank)


class SlotLayer(nn.Module):
    """What a linear and a convolution have in common: the rows bound for the next forward pass."""

    down: Tensor
    up: Tensor
    gain: Tensor

    def __init__(self, base: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.base = base
        self.unbind()

    def unbind(self) -> None:
        """No row has an adapter here: the layer is its base."""
        self.rank = 0
        self.has_gain = False

    def bind(self, down: Tensor, up: Tensor, gain: Tensor | None) -> None:
        """Rows for the next forward pass: down [rows, in…, rank] as `down_shape` says, up [rows, rank, out], gain [rows, out]."""
        self.down, self.up, self.rank = down, up, up.shape[1]
        self.has_gain = gain is not None
        if gain is not None:
            self.gain = gain

    @property
    def weight(self) -> Tensor:
        """Read by libraries that ask a layer for its dtype."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @property
    def fan_in(self) -> int:
        return math.prod(self.base.weight.shape[1:])

    @property
    def fan_out(self) -> int:
        return self.base.weight.shape[0]


class SlotLinear(SlotLayer):
    base: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if not self.rank:
            return self.base(x)
        rows = x.shape[0]
        y = self.base(x)
        shrunk = torch.bmm(x.reshape(rows, -1, x.shape[-1]), self.down)
        out = torch.baddbmm(y.view(rows, -1, y.shape[-1]), shrunk, self.up)
        return self._with_gain(out).view(y.shape) if self.has_gain else out.view(y.shape)

    def _with_gain(self, out: Tensor) -> Tensor:
        bias = 0.0 if self.bias is None else self.bias
        return (out - bias) * self.gain[:, None] + bias


class SlotConv(SlotLayer):
    base: nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.rank:
            return y
        shrunk = self._shrink(x)
        up = self.up.transpose(1, 2)
        out = torch.baddbmm(y.flatten(2), up, shrunk)
        return (self._with_gain(out) if self.has_gain else out).view(y.shape)

    def _shrink(self, x: Tensor) -> Tensor:
        """[rows, rank, positions]: every row through its own kernels, as one convolution with a group per row."""
        rows, channels = x.shape[:2]
        kernels = self.down.transpose(1, 2).reshape(rows * self.rank, channels, *self.base.kernel_size)
        stacked = x.reshape(1, rows * channels, *x.shape[2:])
        base = self.base
        grouped = F.conv2d(stacked, kernels, None, base.stride, base.padding, base.dilation, groups=rows)  # pyright: ignore[reportArgumentType]
        return grouped.view(rows, self.rank, -1)

    def _with_gain(self, out: Tensor) -> Tensor:
        bias = 0.0 if self.bias is None else self.bias[:, None]
        return (out - bias) * self.gain[:, :, None] + bias


class _Place(NamedTuple):
    """Where a layer's adapter lies in a slot's flat row: down at `down`, up at `up`."""

    down: int
    up: int


class SlotBank:
    """Adapter slots for one module: `put` fills a slot, `bind` gives each row of the next forward pass its adapter and weight.

    The bank holds only layers and ranks that adapters have asked for, and grows (copying what it holds) when one asks for more.
    """

    def __init__(self, layers: Mapping[str, SlotLayer], slots: int) -> None:
        self.layers = layers
        self.slots = slots
        weight = next(iter(layers.values())).weight
        self.device, self.dtype = weight.device, weight.dtype
        self.rank = 0
        self.version = 0
        self._places: dict[str, _Place] = {}
        self._up_start = 0
        self._store = torch.zeros(slots, 0, device=self.device, dtype=self.dtype)
        self._gains: dict[str, Tensor] = {}
        self._ranks: list[dict[str, int]] = [{} for _ in range(slots)]
        self._magnitudes: list[frozenset[str]] = [frozenset() for _ in range(slots)]
        self._bound: tuple[tuple[int, ...], tuple[float, ...], int] | None = None

    @property
    def slot_bytes(self) -> int:
        return self._store.shape[1] * self._store.element_size()

    def covers(self, weights: Mapping[str, ModuleWeights]) -> bool:
        """Whether `weights` fit the present layout."""
        return all(name in self._places and part.rank <= self.rank for name, part in weights.items())

    def grow(self, weights: Mapping[str, ModuleWeights]) -> None:
        """Makes room for `weights`: their layers, their rank. Addresses change, so compiled forwards are made anew."""
        old_places, old_store, old_rank, old_up = self._places, self._store, self.rank, self._up_start
        names = [name for name in self.layers if name in old_places or name in weights]
        self.rank = bucket_rank(max([old_rank, *(part.rank for part in weights.values())]))
        self._lay_out(names)
        self._store = torch.zeros(self.slots, self._size(names), device=self.device, dtype=self.dtype)
        for name, place in old_places.items():
            fan_in, fan_out = self.layers[name].fan_in, self.layers[name].fan_out
            down, up = self._views(name, self._store, self.rank)
            down[:, :, :old_rank] = _down_view(old_store, place.down, fan_in, old_rank)
            up[:, :old_rank] = _up_view(old_store, old_up + place.up, old_rank, fan_out)
        self.version += 1
        self._bound = None

    def pack(self, weights: Mapping[str, ModuleWeights]) -> Tensor:
        """`weights` as one flat row of the present layout, on the host; `put` takes it in one copy."""
        row = torch.zeros(1, self._store.shape[1], dtype=self.dtype)
        for name, part in weights.items():
            down, up = self._views(name, row, self.rank)
            down[0, :, : part.rank] = part.down.flatten(1).T
            up[0, : part.rank] = (part.up * part.scale).T
        return row[0].pin_memory() if self.device.type == "cuda" else row[0]

    def put(self, slot: int, row: Tensor, weights: Mapping[str, ModuleWeights]) -> None:
        """Fills a slot with a packed row of the present layout; `weights` are what it was packed from."""
        self._store[slot].copy_(row, non_blocking=True)
        self._ranks[slot] = {name: part.rank for name, part in weights.items()}
        for name, part in weights.items():
            if part.magnitude is not None:
                self._put_gain(slot, name, part)
        self._magnitudes[slot] = frozenset(name for name, part in weights.items() if part.magnitude is not None)
        self._bound = None

    def clear(self, slot: int) -> None:
        """Forgets a slot's adapter, so that no row can read it by mistake."""
        self._store[slot].zero_()
        self._ranks[slot], self._magnitudes[slot] = {}, frozenset()
        self._bound = None

    def bind(self, slots: Sequence[int], weights: Sequence[float], *, rank: int | None = None) -> None:
        """Row i of the next forward pass has the adapter of `slots[i]` times `weights[i]`. `rank` widens every layer to it."""
        wanted = (tuple(slots), tuple(weights), rank or self.bound_rank(slots))
        if wanted == self._bound:
            return
        self._bound = wanted
        targets = set[str]().union(*(self._ranks[slot] for slot in set(slots)))
        rows = self._rows(slots, weights)
        for name, layer in self.layers.items():
            if name in targets:
                down, up = self._views(name, rows, wanted[2])
                layer.bind(down, up, self._row_gains(name, slots, weights))
            elif layer.rank:
                layer.unbind()

    def bound_rank(self, slots: Iterable[int]) -> int:
        """The rank bucket that the adapters in `slots` need together; 0 when none has any weights here."""
        highest = max((rank for slot in set(slots) for rank in self._ranks[slot].values()), default=0)
        return bucket_rank(highest) if highest else 0

    def _rows(self, slots: Sequence[int], weights: Sequence[float]) -> Tensor:
        index = torch.tensor(slots, device=self.device)
        scale = torch.tensor(weights, device=self.device, dtype=self.dtype)
        rows = self._store.index_select(0, index)
        rows[:, self._up_start :] *= scale[:, None]
        return rows

    def _views(self, name: str, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        layer, place = self.layers[name], self._places[name]
        down = _down_view(rows, place.down, layer.fan_in, self.rank)
        up = _up_view(rows, self._up_start + place.up, self.rank, layer.fan_out)
        return down[:, :, :rank], up[:, :rank]

    def _lay_out(self, names: Sequence[str]) -> None:
        """All downs first, then all ups, so that a row's weight is folded in by one multiplication."""
        down = up = 0
        self._places = {}
        for name in names:
            self._places[name] = _Place(down, up)
            down += self.layers[name].fan_in * self.rank
            up += self.layers[name].fan_out * self.rank
        self._up_start = down

    def _size(self, names: Sequence[str]) -> int:
        return sum((self.layers[name].fan_in + self.layers[name].fan_out) * self.rank for name in names)

    def _put_gain(self, slot: int, name: str, part: ModuleWeights) -> None:
        """‖W + s·BA‖² is a quadratic in s: keep its three coefficients and m², float32 [slots, 4, out]."""
        base = self.layers[name].base.weight.detach().flatten(1).float()
        change = (part.up.float() @ part.down.flatten(1).float() * part.scale).to(base.device)
        if name not in self._gains:
            self._gains[name] = torch.zeros(self.slots, 4, base.shape[0], device=self.device)
        assert part.magnitude is not None
        square = part.magnitude.float().to(base.device) ** 2
        parts = [base.square().sum(1), 2 * (base * change).sum(1), change.square().sum(1), square]
        self._gains[name][slot] = torch.stack(parts)

    def _row_gains(self, name: str, slots: Sequence[int], weights: Sequence[float]) -> Tensor | None:
        if not any(name in self._magnitudes[slot] for slot in slots):
            return None
        gains = torch.ones(len(slots), self.layers[name].fan_out, device=self.device)
        for row, (slot, s) in enumerate(zip(slots, weights, strict=True)):
            if name in self._magnitudes[slot]:
                n0, n1, n2, square = self._gains[name][slot]
                gains[row] = (square / (n0 + s * n1 + s * s * n2)).sqrt()
        return gains.to(self.dtype)


def wrap_layers(module: nn.Module) -> dict[str, SlotLayer]:
    """Replaces every linear and convolution inside `module` by a slot layer around it; returns them by the old names."""
    layers: dict[str, SlotLayer] = {}
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            layers[name] = SlotLinear(child)
        elif isinstance(child, nn.Conv2d) and child.groups == 1:
            layers[name] = SlotConv(child)
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, layer)
    return layers


def _down_view(rows: Tensor, start: int, fan_in: int, rank: int) -> Tensor:
    return rows[:, start : start + fan_in * rank].view(-1, fan_in, rank)


def _up_view(rows: Tensor, start: int, rank: int, fan_out: int) -> Tensor:
    return rows[:, start : start + rank * fan_out].view(-1, rank, fan_out)
