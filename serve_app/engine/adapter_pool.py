"""Where adapters live: slots beside the model, packed rows in host memory, files on disk; each level forgets the least recently used.

Reading and packing happen on one background thread. Only a finished row is copied into a slot, between two steps, so a run
that waits for its adapter never delays a run that has its own.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.adapters_file import AdapterWeights, LayerTable, UnusableAdapter, read_adapter
from serve_app.engine.lora import NO_SLOT, SlotBank
from serve_app.engine.run import AdapterFile


@dataclass(slots=True)
class _Packed:
    """An adapter in host memory: its weights, and per component the flat row of one layout version."""

    weights: AdapterWeights
    rows: dict[str, tuple[int, Tensor]]

    @property
    def size_bytes(self) -> int:
        parts = (part for layers in self.weights.values() for part in layers.values())
        packed = sum(row.nbytes for _, row in self.rows.values())
        return packed + sum(part.down.nbytes + part.up.nbytes for part in parts)


class AdapterPool:
    """Gives runs their adapter's slot and takes it back. `expect` is for any thread; the rest is the step thread's."""

    def __init__(
        self,
        banks: Mapping[str, SlotBank],
        table: LayerTable,
        *,
        host_memory: int,
        max_rank: int,
        on_loaded: Callable[[], None],
    ) -> None:
        self._banks = banks
        self._table = table
        self._host_memory = host_memory
        self._max_rank = max_rank
        self._on_loaded = on_loaded
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._lock = threading.Lock()
        self._host: OrderedDict[str, Future[_Packed]] = OrderedDict()
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
            future = self._loader.submit(self._load, adapter)
            self._host[adapter.id] = future
        future.add_done_callback(lambda _: self._on_loaded())

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
        return any(bank.bound_rank((slot,)) for name, bank in self._banks.items() if name != "unet")

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    def _settle(self, adapter: AdapterFile) -> int | None:
        """Copies a read adapter into a free or unused slot."""
        self.expect(adapter)
        future = self._host[adapter.id]
        if not future.done():
            return None
        packed = future.result()
        slot = self._free_slot()
        if slot is None:
            return None
        for component, bank in self._banks.items():
            weights = packed.weights.get(component, {})
            if not bank.covers(weights):
                bank.grow(weights)
            if not weights:
                bank.clear(slot)
                continue
            version, row = packed.rows.get(component, (-1, None))
            if row is None or version != bank.version:
                row = bank.pack(weights)
                packed.rows[component] = (bank.version, row)
            bank.put(slot, row, weights)
        with self._lock:
            self._slots[adapter.id] = slot
            self._host.move_to_end(adapter.id)
        self._shrink_host(keep=adapter.id)
        return slot

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        unused = next((id for id, slot in self._slots.items() if not self._users[slot]), None)
        if unused is None:
            return None
        with self._lock:
            return self._slots.pop(unused)

    def _load(self, adapter: AdapterFile) -> _Packed:
        """On the loader's thread: reads, and packs what the present layout covers."""
        weights = read_adapter(adapter.path, self._table, max_rank=self._max_rank, dtype=self._dtype)
        rows: dict[str, tuple[int, Tensor]] = {}
        for component, bank in self._banks.items():
            parts = weights.get(component)
            version = bank.version
            if parts and bank.covers(parts):
                row = bank.pack(parts)
                if bank.version == version:  # else the bank grew meanwhile, and the step thread packs anew
                    rows[component] = (version, row)
        return _Packed(weights, rows)

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


def _failed(future: Future[_Packed]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


__all__ = ["AdapterPool", "UnusableAdapter"]
