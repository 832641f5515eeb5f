"""Where adapters live: slots beside the model, packed rows in host memory, files on disk; each level forgets the least recently used.

Reading and packing happen on background threads. Only a finished row is copied into a slot, between two steps, so a run
that waits for its adapter never delays a run that has its own.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch

from serve_app.engine.adapters_file import AdapterWeights, LayerTable, read_adapter
from serve_app.engine.lora import NO_SLOT, PackedRow, SlotBank, ranks_of
from serve_app.engine.run import AdapterFile

LOADERS = 4
"""Adapters read at once: one on a slow disk must not hold up the others."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """An adapter in host memory: its weights as read, and packed for each component's bank."""

    weights: AdapterWeights
    rows: dict[str, PackedRow]

    @property
    def size_bytes(self) -> int:
        parts = (part for layers in self.weights.values() for part in layers.values())
        return sum(row.flat.nbytes for row in self.rows.values()) + sum(
            part.down.nbytes + part.up.nbytes for part in parts
        )


class AdapterPool:
    """Gives runs their adapter's slot and takes it back. `expect` is for any thread; the rest is the step thread's."""

    def __init__(
        self,
        banks: Mapping[str, SlotBank],
        table: LayerTable,
        *,
        min_slots: int,
        slot_memory: int,
        host_memory: int,
        max_rank: int,
        on_loaded: Callable[[], None],
    ) -> None:
        self._banks = banks
        self._table = table
        self._min_slots = min_slots
        self._slot_memory = slot_memory
        self._host_memory = host_memory
        self._max_rank = max_rank
        self._on_loaded = on_loaded
        self._loader = ThreadPoolExecutor(LOADERS, thread_name_prefix="adapter-loader")
        self._lock = threading.RLock()
        self._host: OrderedDict[str, Future[_Ready]] = OrderedDict()
        self._slots: OrderedDict[str, int] = OrderedDict()
        slots = next(iter(banks.values())).slots
        self._free = list(range(slots - 1, NO_SLOT, -1))
        self._users: Counter[int] = Counter()

    @property
    def resident(self) -> frozenset[str]:
        """Ids of the adapters in slots: a run with one of them starts without a copy."""
        with self._lock:
            return frozenset(self._slots)

    def expect(self, adapter: AdapterFile) -> None:
        """Starts reading an adapter that a run will need, unless it is here already."""
        with self._lock:
            known = self._host.get(adapter.id)
            if adapter.id in self._slots or (known is not None and not _failed(known)):
                return
            self._submit(adapter.id, partial(self._load, adapter))

    def acquire(self, adapter: AdapterFile | None) -> int | None:
        """The adapter's slot, held until `release`; None while it is being read or no slot is free.

        Raises UnusableAdapter or OSError when the file cannot be worn.
        """
        if adapter is None:
            return NO_SLOT
        slot = self._slots.get(adapter.id)
        if slot is None:
            slot = self._settle(adapter)
        if slot is not None:
            with self._lock:
                self._slots.move_to_end(adapter.id)
            self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._users[slot] -= 1

    def has_text(self, slot: int) -> bool:
        """Whether the adapter in `slot` changes a text encoder."""
        return any(bank.rank_of((slot,)) for name, bank in self._banks.items() if name != "unet")

    def reserve(self, component: str, ranks: Mapping[str, int]) -> None:
        """Widens one bank's slots so that adapters of these ranks fit, by layer. Where memory then holds fewer slots, the
        highest unused ones go, in every bank."""
        layouts = {name: bank.layout for name, bank in self._banks.items()} | {
            component: self._banks[component].grown(ranks)
        }
        slot_bytes = sum(layout.size for layout in layouts.values()) * self._dtype.itemsize
        highest_used = max((slot for slot, users in self._users.items() if users), default=NO_SLOT)
        fit = max(self._slot_memory // slot_bytes, self._min_slots, 1 + highest_used)
        slots = min(fit, self._banks[component].slots)
        with self._lock:
            self._slots = OrderedDict((id, slot) for id, slot in self._slots.items() if slot < slots)
        self._free = [slot for slot in self._free if slot < slots]
        for name, bank in self._banks.items():
            if name == component or bank.slots != slots:
                bank.change_layout(layouts[name], slots)

    def wait_for_loader(self) -> None:
        """Returns once every adapter expected so far has been read."""
        with self._lock:
            futures = list(self._host.values())
        wait(futures)

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    def _settle(self, adapter: AdapterFile) -> int | None:
        """Copies a read adapter into a free or unused slot."""
        future = self._host.get(adapter.id)
        if future is None or not future.done():
            self.expect(adapter)
            return None
        if _failed(future):
            with self._lock:
                del self._host[adapter.id]  # a later run may try again: the file may have come back
        ready = future.result()
        for component, weights in ready.weights.items():
            if not self._banks[component].layout.covers(ranks_of(weights)):
                self.reserve(component, ranks_of(weights))
        if not self._is_packed(ready):
            self._submit(adapter.id, partial(self._pack, ready.weights))
            return None
        slot = self._free_slot()
        if slot is None:
            return None
        for component, bank in self._banks.items():
            if component in ready.rows:
                bank.put(slot, ready.rows[component])
            else:
                bank.clear(slot)
        with self._lock:
            self._slots[adapter.id] = slot
            self._host.move_to_end(adapter.id)
        self._shrink_host(keep=adapter.id)
        return slot

    def _is_packed(self, ready: _Ready) -> bool:
        """Not so where a bank has grown since: then the adapter is packed again, on a loader's thread like the first time."""
        return all(
            component in ready.rows and ready.rows[component].version == self._banks[component].layout.version
            for component in ready.weights
        )

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        unused = next((id for id, slot in self._slots.items() if not self._users[slot]), None)
        if unused is None:
            return None
        with self._lock:
            return self._slots.pop(unused)

    def _submit(self, id: str, work: Callable[[], _Ready]) -> None:
        future = self._loader.submit(work)
        with self._lock:
            self._host[id] = future
        future.add_done_callback(lambda _: self._on_loaded())

    def _load(self, adapter: AdapterFile) -> _Ready:
        return self._pack(read_adapter(adapter.path, self._table, max_rank=self._max_rank, dtype=self._dtype))

    def _pack(self, weights: AdapterWeights) -> _Ready:
        """For the banks' present layouts, as far as those cover it."""
        rows = {name: self._banks[name].pack(parts) for name, parts in weights.items()}
        return _Ready(weights, {name: row for name, row in rows.items() if row is not None})

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._banks.values())).dtype

    def _shrink_host(self, *, keep: str) -> None:
        with self._lock:
            ready = [(id, future) for id, future in self._host.items() if future.done()]
            sizes = {id: 0 if _failed(future) else future.result().size_bytes for id, future in ready}
            total = sum(sizes.values())
            for id, size in sizes.items():
                if total <= self._host_memory:
                    return
                if id != keep:
                    del self._host[id]
                    total -= size


def _failed(future: Future[_Ready]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
