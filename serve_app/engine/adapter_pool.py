"""Stores adapters on three levels: slots beside the model, host memory, files on disk.

Each level evicts the least recently used. Reading and packing happen on background threads; only a finished row is
copied into a slot, between two steps, so that a run which waits for its adapter never delays a run that has its own.
On a CPU slots are host memory, too: there an adapter leaves one level for the other, and is never in both.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from serve_app.engine.adapter_slots import NO_SLOT, AdapterSlots, PackedRow
from serve_app.engine.adapter_store import AdapterStore
from serve_app.engine.adapters import LayerTable, UnusableAdapter, read_adapter
from serve_app.engine.run import AdapterFile, Measured

LOADERS = 4
"""This many adapters are read at once, so that one on a slow disk does not delay the others."""


Packed = Mapping[str, PackedRow]
"""An adapter in host memory, packed for each component that it changes."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where an adapter is."""

    slot: int
    start: int
    """Its first line in the store; its components' rows follow each other."""
    packed: Packed
    """Its rows, without their lines on a CPU."""


class AdapterPool:
    """Assigns slots to adapters.

    `prefetch`, `preload`, `in_memory`, `resident` and the sizes are for any thread, all else for the step thread.
    """

    def __init__(
        self,
        component_slots: Mapping[str, AdapterSlots],
        store: AdapterStore,
        table: LayerTable,
        *,
        host_memory: int,
        max_rank: int,
        on_loaded: Callable[[], None],
        measured: Measured | None = None,
    ) -> None:
        self._component_slots = component_slots
        self._store = store
        self._table = table
        self._host_memory = host_memory
        self._max_rank = max_rank
        self._on_loaded = on_loaded
        self._measured = measured or Measured()
        self._is_host = store.lines.is_cpu
        self._loader = ThreadPoolExecutor(LOADERS, thread_name_prefix="adapter-loader")
        self._lock = threading.RLock()
        self._host: OrderedDict[str, Future[Packed]] = OrderedDict()
        self._slots: OrderedDict[str, _Placed] = OrderedDict()
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
        """Return bytes of the adapters in slots, and of the rows that batches gather from them."""
        return self._store.size_bytes + sum(slots.size_bytes for slots in self._component_slots.values())

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
            sizes = [_host_size(future) for future in read]
            if not sizes:
                return not unread and self._host_memory > 0
            return sum(sizes) + (unread + 1) * max(sizes) < self._host_memory

    def preload(self, adapter: AdapterFile) -> bool:
        """Start reading an adapter that no run needs yet, if there is space; return whether it was started."""
        with self._lock:
            if adapter.id in self._slots or adapter.id in self._host or not self.has_space():
                return False
            self._submit(adapter.id, partial(self._load, adapter))
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
        placed = self._slots.get(adapter.id) or self._fill_slot(adapter)
        if placed is None:
            return None
        with self._lock:
            self._slots.move_to_end(adapter.id)
        self._users[placed.slot] += 1
        return placed.slot

    def release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._users[slot] -= 1

    def wait_for_loader(self) -> None:
        """Return once every adapter prefetched so far has been read."""
        with self._lock:
            futures = list(self._host.values())
        wait(futures)

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    def _fill_slot(self, adapter: AdapterFile) -> _Placed | None:
        """Copy a read adapter into a free or unused slot."""
        future = self._host.get(adapter.id)
        if future is None or not future.done():
            self.prefetch(adapter)
            return None
        if _failed(future):
            with self._lock:
                del self._host[adapter.id]  # a later run may try again: the file may have come back
        packed = future.result()
        room = self._make_room(sum(len(row.lines) for row in packed.values()))
        if room is None:
            return None
        slot, start = room
        placed = _Placed(slot, start, self._copy(packed, slot, start))
        with self._lock:
            self._slots[adapter.id] = placed
            if self._is_host:
                del self._host[adapter.id]
            else:
                self._host.move_to_end(adapter.id)
        self._shrink_host(keep=adapter.id)
        return placed

    def _copy(self, packed: Packed, slot: int, start: int) -> Packed:
        """Copy an adapter into a slot; return it with its lines in the store where that is host memory."""
        placed: dict[str, PackedRow] = {}
        for component, slots in self._component_slots.items():
            if component not in packed:
                slots.reset(slot)
                continue
            row = packed[component]
            slots.set(slot, row, start)
            end = start + len(row.lines)
            placed[component] = row._replace(lines=self._store.lines[start:end]) if self._is_host else row
            start = end
        return placed

    def _make_room(self, lines: int) -> tuple[int, int] | None:
        """Take a slot and so many lines, of unused adapters where none are free; None while too many are in use."""
        unused = [id for id, placed in self._slots.items() if not self._users[placed.slot]]
        removable = [self._slots[id].start for id in unused]
        if not (self._free or unused) or not self._store.could_take(lines, without=removable):
            return None
        while not self._free or (start := self._store.take(lines)) is None:
            self._evict(unused.pop(0))
        return self._free.pop(), start

    def _evict(self, id: str) -> None:
        self._measured.evictions.append(id)
        with self._lock:
            placed = self._slots.pop(id)
            if self._is_host:
                self._host[id] = Future()
                self._host[id].set_result(
                    {name: row._replace(lines=row.lines.clone()) for name, row in placed.packed.items()}
                )
        self._store.free(placed.start)
        self._free.append(placed.slot)

    def _submit(self, id: str, work: Callable[[], Packed]) -> None:
        future = self._loader.submit(work)
        with self._lock:
            self._host[id] = future
        future.add_done_callback(lambda _: self._on_loaded())

    def _load(self, adapter: AdapterFile) -> Packed:
        began = time.monotonic()
        weights = read_adapter(adapter.path, self._table, max_rank=self._max_rank, dtype=self._store.dtype)
        packed = {name: self._component_slots[name].pack(parts) for name, parts in weights.items()}
        self._measured.loads.append(time.monotonic() - began)
        if _size(packed) > self._store.most_bytes:
            raise UnusableAdapter(
                f"it takes {_size(packed) / 1e6:.1f} MB beside the model, this server has "
                f"{self._store.most_bytes / 1e6:.1f} MB for adapters: train a smaller one, or raise adapter_memory"
            )
        return packed

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


def _size(packed: Packed) -> int:
    return sum(row.lines.nbytes for row in packed.values())


def _host_size(future: Future[Packed]) -> int:
    """Return the bytes of what a finished load gave."""
    return 0 if _failed(future) else _size(future.result())


def _failed(future: Future[Packed]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
