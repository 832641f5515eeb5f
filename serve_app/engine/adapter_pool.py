"""Stores adapters on three levels: slots beside the model, host memory, files on disk.

Each level evicts the least recently used. Reading and packing happen on background threads; only a finished row is
copied into a slot, between two steps, so that a run which waits for its adapter never delays a run that has its own.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch

from serve_app.engine.adapter_slots import NO_SLOT, AdapterSlots, PackedRow, ranks_of
from serve_app.engine.adapters import AdapterWeights, LayerTable, read_adapter
from serve_app.engine.run import AdapterFile, Measured

PADDED = 1.5
"""The rows of an adapter that no run needs yet may take this many times the size of its weights."""
LOADERS = 4
"""This many adapters are read at once, so that one on a slow disk does not delay the others."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """Holds an adapter in host memory, packed for each component's slots or as its weights were read."""

    ranks: Mapping[str, Mapping[str, int]]
    """The rank of each layer of each component."""
    rows: Mapping[str, PackedRow]
    weights: AdapterWeights | None
    size_bytes: int


class AdapterPool:
    """Assigns slots to adapters.

    `prefetch`, `preload`, `in_memory`, `resident` and the sizes are for any thread, all else for the step thread.
    """

    def __init__(
        self,
        component_slots: Mapping[str, AdapterSlots],
        table: LayerTable,
        *,
        min_slots: int,
        slot_memory: int,
        host_memory: int,
        max_rank: int,
        on_loaded: Callable[[], None],
        measured: Measured | None = None,
    ) -> None:
        self._component_slots = component_slots
        self._table = table
        self._min_slots = min_slots
        self._slot_memory = slot_memory
        self._host_memory = host_memory
        self._max_rank = max_rank
        self._on_loaded = on_loaded
        self._measured = measured or Measured()
        self._loader = ThreadPoolExecutor(LOADERS, thread_name_prefix="adapter-loader")
        self._lock = threading.RLock()
        self._host: OrderedDict[str, Future[_Ready]] = OrderedDict()
        self._slots: OrderedDict[str, int] = OrderedDict()
        count = next(iter(component_slots.values())).count
        self._free = list(range(count - 1, NO_SLOT, -1))
        self._users: Counter[int] = Counter()

    @property
    def resident(self) -> frozenset[str]:
        """Return ids of the adapters in slots: a run with one of them starts at once."""
        with self._lock:
            return frozenset(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Return bytes of all slots on the device, used or not."""
        return sum(slots.size_bytes for slots in self._component_slots.values())

    @property
    def host_bytes(self) -> int:
        """Return bytes of the adapters in host memory."""
        with self._lock:
            futures = list(self._host.values())
        return sum(_host_size(future) for future in futures if future.done())

    @property
    def in_memory(self) -> frozenset[str]:
        """Return ids of the adapters in slots or read into host memory: a run with one waits for no file."""
        with self._lock:
            read = (id for id, future in self._host.items() if future.done() and not _failed(future))
            return frozenset((*self._slots, *read))

    def has_space(self) -> bool:
        """Return whether host memory has space for another adapter, as large as the largest there.

        While the first is being read nobody knows how large adapters are.
        """
        with self._lock:
            read = [future for future in self._host.values() if future.done() and not _failed(future)]
            unread = sum(not future.done() for future in self._host.values())
            sizes = [future.result().size_bytes for future in read]
            if not sizes:
                return not unread and self._host_memory > 0
            return sum(sizes) + (unread + 1) * max(sizes) < self._host_memory

    def preload(self, adapter: AdapterFile) -> bool:
        """Start reading an adapter that no run needs yet, if there is space; return whether it was started."""
        with self._lock:
            if adapter.id in self._slots or adapter.id in self._host or not self.has_space():
                return False
            self._submit(adapter.id, partial(self._load, adapter, is_needed=False))
            return True

    def prefetch(self, adapter: AdapterFile) -> None:
        """Start reading an adapter that a run will need, unless it is in memory already."""
        with self._lock:
            known = self._host.get(adapter.id)
            if adapter.id in self._slots or (known is not None and not _failed(known)):
                return
            self._submit(adapter.id, partial(self._load, adapter))

    def acquire(self, adapter: AdapterFile | None) -> int | None:
        """Acquire the adapter's slot until `release`; None while it is being read or no slot is free.

        Raises UnusableAdapter or OSError when the file cannot be used.
        """
        if adapter is None:
            return NO_SLOT
        slot = self._slots.get(adapter.id)
        if slot is None:
            slot = self._fill_slot(adapter)
        if slot is not None:
            with self._lock:
                self._slots.move_to_end(adapter.id)
            self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._users[slot] -= 1

    def reserve(self, component: str, ranks: Mapping[str, int]) -> None:
        """Widen one component's slots for adapters of these ranks, by layer.

        Where memory then holds fewer slots, the highest unused ones are dropped, in every component.
        """
        layouts = {name: slots.layout for name, slots in self._component_slots.items()} | {
            component: self._component_slots[component].grow_layout(ranks)
        }
        slot_bytes = sum(layout.size for layout in layouts.values()) * self._dtype.itemsize
        highest_used = max((slot for slot, users in self._users.items() if users), default=NO_SLOT)
        fit = max(self._slot_memory // slot_bytes, self._min_slots, 1 + highest_used)
        count = min(fit, self._component_slots[component].count)
        with self._lock:
            self._measured.evictions.extend(id for id, slot in self._slots.items() if slot >= count)
            self._slots = OrderedDict((id, slot) for id, slot in self._slots.items() if slot < count)
        self._free = [slot for slot in self._free if slot < count]
        for name, slots in self._component_slots.items():
            if name == component or slots.count != count:
                slots.change_layout(layouts[name], count)

    def wait_for_loader(self) -> None:
        """Return once every adapter prefetched so far has been read."""
        with self._lock:
            futures = list(self._host.values())
        wait(futures)

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    def _fill_slot(self, adapter: AdapterFile) -> int | None:
        """Copy a read adapter into a free or unused slot."""
        future = self._host.get(adapter.id)
        if future is None or not future.done():
            self.prefetch(adapter)
            return None
        if _failed(future):
            with self._lock:
                del self._host[adapter.id]  # a later run may try again: the file may have come back
        ready = future.result()
        for component, ranks in ready.ranks.items():
            if not self._component_slots[component].layout.covers(ranks):
                self.reserve(component, ranks)
        if not self._is_packed(ready):
            weights = ready.weights
            self._submit(adapter.id, partial(self._load, adapter) if weights is None else partial(self._pack, weights))
            return None
        slot = self._free_slot()
        if slot is None:
            return None
        for component, slots in self._component_slots.items():
            if component in ready.rows:
                slots.set(slot, ready.rows[component])
            else:
                slots.reset(slot)
        with self._lock:
            self._slots[adapter.id] = slot
            self._host.move_to_end(adapter.id)
        self._shrink_host(keep=adapter.id)
        return slot

    def _is_packed(self, ready: _Ready) -> bool:
        """Return False where slots have grown since. Then a loader thread packs the adapter again."""
        return all(
            component in ready.rows and ready.rows[component].version == self._component_slots[component].layout.version
            for component in ready.ranks
        )

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        unused = next((id for id, slot in self._slots.items() if not self._users[slot]), None)
        if unused is None:
            return None
        self._measured.evictions.append(unused)
        with self._lock:
            return self._slots.pop(unused)

    def _submit(self, id: str, work: Callable[[], _Ready]) -> None:
        future = self._loader.submit(work)
        with self._lock:
            self._host[id] = future
        future.add_done_callback(lambda _: self._on_loaded())

    def _load(self, adapter: AdapterFile, *, is_needed: bool = True) -> _Ready:
        began = time.monotonic()
        weights = read_adapter(adapter.path, self._table, max_rank=self._max_rank, dtype=self._dtype)
        ready = self._pack(weights, is_needed=is_needed)
        self._measured.loads.append(time.monotonic() - began)
        return ready

    def _pack(self, weights: AdapterWeights, *, is_needed: bool = True) -> _Ready:
        """Pack an adapter for the present layouts of the slots, if those cover it.

        An adapter that no run needs yet stays as it was read where that is much smaller: its rows would be padded to
        the slots' rank.
        """
        ranks = {name: ranks_of(parts) for name, parts in weights.items()}
        size = _weight_bytes(weights)
        if is_needed or self._row_bytes(weights) <= PADDED * size:
            rows = {name: self._component_slots[name].pack(parts) for name, parts in weights.items()}
            packed = {name: row for name, row in rows.items() if row is not None}
            if len(packed) == len(rows):
                return _Ready(ranks, packed, None, sum(row.size_bytes for row in packed.values()))
        return _Ready(ranks, {}, weights, size)

    def _row_bytes(self, weights: AdapterWeights) -> int:
        return sum(self._component_slots[name].layout.size for name in weights) * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._component_slots.values())).dtype

    def _shrink_host(self, *, keep: str) -> None:
        with self._lock:
            ready = [(id, future) for id, future in self._host.items() if future.done()]
            sizes = {id: _host_size(future) for id, future in ready}
            total = sum(sizes.values())
            for id, size in sizes.items():
                if total <= self._host_memory:
                    return
                if id != keep:
                    del self._host[id]
                    total -= size


def _weight_bytes(weights: AdapterWeights) -> int:
    parts = (part for layers in weights.values() for part in layers.values())
    return sum(part.down.nbytes + part.up.nbytes for part in parts)


def _host_size(future: Future[_Ready]) -> int:
    """Return the bytes of what a finished load gave."""
    return 0 if _failed(future) else future.result().size_bytes


def _failed(future: Future[_Ready]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
