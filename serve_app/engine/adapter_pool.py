"""Stores adapters on three levels: slots beside the denoiser, host memory, files on disk.

Each level gives up first what no waiting run needs, least recently used, then what is needed last. Reading and packing
happen on background threads; only a finished row is copied into a slot, between two steps, so that a run which waits
for its adapter never delays a run that has its own. On a CPU slots are host memory, too: there an adapter leaves one
level for the other, and is never in both.
"""

import itertools
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

from serve_app.engine.adapter_slots import NO_SLOT, AdapterSlots, PackedRow
from serve_app.engine.adapter_store import AdapterStore
from serve_app.engine.adapters.composed import compose
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import AdapterWeights, read_adapter
from serve_app.engine.device import DeviceQueues
from serve_app.engine.run import Adapter, AdapterFile, Measured

LOADERS = 4
"""This many adapters are read at once, so that one on a slow disk does not delay the others. As many are read ahead of
waiting runs where host memory has space for fewer."""


class _Packed(NamedTuple):
    """An adapter in host memory."""

    row: PackedRow
    encoders: AdapterWeights
    """The text encoders' parts as they were read, since each prompt needs them only once."""
    encoder_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.row.lines.nbytes + self.encoder_bytes


class _Placed(NamedTuple):
    """Where an adapter is."""

    slot: int
    start: int
    """Its first line in the store."""
    packed: _Packed
    """What was read. On a CPU its row's lines are those in the store, not a second copy."""
    copied: Future[None] | None
    """The copy into the store, which a GPU makes while steps go on; None where it was made at once."""

    @property
    def is_there(self) -> bool:
        return self.copied is None or self.copied.done()


class AdapterPool:
    """Assigns slots to adapters. `acquire` and `release` are for the step thread, all else for any."""

    def __init__(
        self,
        adapter_slots: AdapterSlots,
        store: AdapterStore,
        queues: DeviceQueues,
        table: LayerTable,
        denoiser: str,
        *,
        host_memory: int,
        max_rank: int,
        on_loaded: Callable[[], None],
        measured: Measured | None = None,
    ) -> None:
        """`denoiser` names the component of the slots; a loader thread calls `on_loaded` when an adapter was read."""
        self._adapter_slots = adapter_slots
        self._store = store
        self._queues = queues
        self._table = table
        self._denoiser = denoiser
        self._host_memory = host_memory
        self._max_rank = max_rank
        self._on_loaded = on_loaded
        self._measured = measured or Measured()
        self._loader = ThreadPoolExecutor(LOADERS, thread_name_prefix="adapter-loader")
        self._lock = threading.RLock()
        self._is_host = store.lines.is_cpu
        self._host: OrderedDict[str, Future[_Packed]] = OrderedDict()
        self._slots: OrderedDict[str, _Placed] = OrderedDict()
        self._turns: dict[str, int] = {}
        """The place among the adapters that waiting runs need, by id."""
        self._free = list(range(adapter_slots.count - 1, NO_SLOT, -1))
        self._users: Counter[int] = Counter()

    @property
    def resident(self) -> frozenset[str]:
        """Return ids of the adapters in slots: a run with one of them starts at once."""
        with self._lock:
            return frozenset(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Return bytes of the slots' store and of the rows that batches gather from it.

        A GPU's store counts whole, used or not; a CPU's counts only what adapters take: unused pages are no memory.
        """
        store = self._store.size_bytes if self._is_host else self._store.lines.nbytes
        return store + self._adapter_slots.size_bytes

    @property
    def host_bytes(self) -> int:
        """Return bytes of the adapters in host memory, with the text encoders' parts of those in slots alone."""
        with self._lock:
            beside = sum(placed.packed.encoder_bytes for id, placed in self._slots.items() if id not in self._host)
            return sum(self._sizes().values()) + beside

    @property
    def in_memory(self) -> frozenset[str]:
        """Return ids of the adapters in slots or read into host memory: a run with one waits for no file."""
        with self._lock:
            return frozenset((*self._slots, *self._sizes()))

    def has_space(self) -> bool:
        """Return whether host memory has space for another adapter, as large as the largest there.

        While the first is being read nobody knows how large adapters are.
        """
        with self._lock:
            sizes = self._sizes().values()
            unread = sum(not future.done() for future in self._host.values())
            if not sizes:
                return not unread and self._host_memory > 0
            return sum(sizes) + (unread + 1) * max(sizes) < self._host_memory

    def preload(self, adapter: Adapter) -> bool:
        """Start reading an adapter that no run needs yet, if there is space; return whether it was started."""
        with self._lock:
            if adapter.id in self._slots or adapter.id in self._host or not self.has_space():
                return False
            self._submit(adapter.id, partial(self._load, adapter))
            return True

    def read_ahead(self, adapters: Iterable[Adapter]) -> None:
        """Start reading what waiting runs need, in the order of their turns, as far as host memory has space.

        What is named here takes the place of what was named before, and is kept until its run has it.
        """
        with self._lock:
            needed = {adapter.id: adapter for adapter in adapters}
            self._turns = {id: turn for turn, id in enumerate(needed)}
            ahead = [id for id in needed if id not in self._slots]
            if not ahead:
                return
            fitting = ahead[: self._fitting(ahead)]
            self._shrink_host(keep=fitting)
            for id in fitting:
                if id not in self._host:
                    self._submit(id, partial(self._load, needed[id]))

    def encoder_parts(self, adapter: Adapter | None) -> AdapterWeights | None:
        """Return what the adapter changes in the text encoders; None until it has been read.

        Raises UnusableAdapter or OSError when the file cannot be used; it is then read again for the next run.
        """
        if adapter is None:
            return {}
        with self._lock:
            if adapter.id in self._slots:
                return self._slots[adapter.id].packed.encoders
            packed = self._read(adapter)
            return None if packed is None else packed.encoders

    def acquire(self, adapter: Adapter | None) -> int | None:
        """Acquire the adapter's slot until `release`; None while it is being read or no slot is free.

        Raises as `encoder_parts` does.
        """
        if adapter is None:
            return NO_SLOT
        placed = self._slots.get(adapter.id) or self._fill_slot(adapter)
        if placed is None or not placed.is_there:
            return None
        if placed.copied is not None:
            placed.copied.result()
        with self._lock:
            self._slots.move_to_end(adapter.id)
        self._users[placed.slot] += 1
        return placed.slot

    def release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._users[slot] -= 1

    def wait_for_loader(self) -> None:
        """Return once every adapter that is being read has been."""
        with self._lock:
            futures = list(self._host.values())
        wait(futures)

    def close(self) -> None:
        self._loader.shutdown(cancel_futures=True)

    def _read(self, adapter: Adapter) -> _Packed | None:
        """Return what reading gave, or raise its error and forget it, since the file may come back."""
        future = self._host.get(adapter.id)
        if future is None or not future.done():
            return None
        if _failed(future):
            del self._host[adapter.id]
        return future.result()

    def _fill_slot(self, adapter: Adapter) -> _Placed | None:
        """Copy a read adapter into a free or unused slot."""
        with self._lock:
            packed = self._read(adapter)
        room = None if packed is None else self._make_room(max(1, len(packed.row.lines)), adapter)
        if packed is None or room is None:
            return None
        slot, start = room
        self._adapter_slots.assign(slot, packed.row, start)
        copied = self._copy(start, packed.row)
        with self._lock:
            if self._is_host:
                self._host.pop(adapter.id, None)
                held = self._store.lines[start : start + len(packed.row.lines)]
                packed = packed._replace(row=packed.row._replace(lines=held))
            elif adapter.id in self._host:
                self._host.move_to_end(adapter.id)
            self._slots[adapter.id] = _Placed(slot, start, packed, copied)
        return self._slots[adapter.id]

    def _copy(self, start: int, row: PackedRow) -> Future[None] | None:
        """Copy a row into the store, on a GPU by another thread and behind the steps that may still read those lines."""
        if not self._queues.any:
            self._store.write(start, row.lines)
            return None
        steps = self._queues.mark()

        def copy() -> None:
            with self._queues.beside(steps):
                self._store.write(start, row.lines)

        copied = self._loader.submit(copy)
        copied.add_done_callback(lambda _: self._on_loaded())
        return copied

    def _make_room(self, lines: int, adapter: Adapter) -> tuple[int, int] | None:
        """Take a slot and `lines` lines; None while too many are in use, or needed by runs before this adapter's.

        Where none are free, those of adapters that no waiting run needs are taken, then of those needed last.
        """
        unused = [id for id, placed in self._slots.items() if placed.is_there and not self._users[placed.slot]]
        removable = [id for id in unused if self._turn(id) >= self._turn(adapter.id)]
        removable.sort(key=self._turn, reverse=True)
        starts = [self._slots[id].start for id in removable]
        if not (self._free or removable) or not self._store.could_take(lines, without=starts):
            return None
        while not self._free or (start := self._store.take(lines)) is None:
            self._evict(removable.pop(0))
        return self._free.pop(), start

    def _evict(self, id: str) -> None:
        self._measured.evictions.append(id)
        with self._lock:
            slot, start, packed, _ = self._slots.pop(id)
            if self._is_host:
                self._host[id] = Future()
                self._host[id].set_result(packed._replace(row=packed.row._replace(lines=packed.row.lines.clone())))
        self._store.free(start)
        self._free.append(slot)

    def _turn(self, id: str) -> float:
        return self._turns.get(id, math.inf)

    def _fitting(self, ahead: Sequence[str]) -> int:
        """Return how many of these adapters host memory has space for, each as large as the largest known if unread."""
        sizes = self._sizes()
        known = (*sizes.values(), *(placed.packed.size_bytes for placed in self._slots.values()))
        largest = max(known, default=self._host_memory)
        totals = itertools.accumulate(sizes.get(id, largest) for id in ahead)
        return max(LOADERS, sum(total <= self._host_memory for total in totals))

    def _shrink_host(self, *, keep: Collection[str]) -> None:
        """Make space for what is being read and for `keep`, of which nothing is dropped."""
        for id in [id for id, future in self._host.items() if _failed(future) and id not in keep]:
            del self._host[id]
        sizes = self._sizes()
        unread = sum(id not in sizes for id in {*self._host, *keep})
        total = sum(sizes.values()) + unread * max(sizes.values(), default=0)
        for id in sorted((id for id in sizes if id not in keep), key=self._turn, reverse=True):
            if total <= self._host_memory:
                return
            del self._host[id]
            total -= sizes[id]

    def _sizes(self) -> dict[str, int]:
        """Return bytes of each adapter that has been read into host memory, the least recently used first."""
        return {id: it.result().size_bytes for id, it in self._host.items() if it.done() and not _failed(it)}

    def _submit(self, id: str, work: Callable[[], _Packed]) -> None:
        future = self._loader.submit(work)
        with self._lock:
            self._host[id] = future
        future.add_done_callback(lambda _: self._on_loaded())

    def _load(self, adapter: Adapter) -> _Packed:
        began = time.monotonic()
        parts = self._read_parts(adapter)
        row = self._adapter_slots.pack(parts.pop(self._denoiser, {}))
        beside = [part for layers in parts.values() for part in layers.values()]
        packed = _Packed(row, parts, sum(part.size_bytes for part in beside))
        self._measured.loads.append(time.monotonic() - began)
        size = row.lines.nbytes
        if size > self._store.most_bytes:
            raise UnusableAdapter(
                f"it takes {size / 1e6:.1f} MB of memory, and this server has {self._store.most_bytes / 1e6:.1f} MB "
                "for adapters: train a smaller one, or raise adapter_memory"
            )
        return packed

    def _read_parts(self, adapter: Adapter) -> AdapterWeights:
        read = partial(read_adapter, table=self._table, max_rank=self._max_rank, dtype=self._store.dtype)
        if isinstance(adapter, AdapterFile):
            return read(adapter.path)
        weighted: list[tuple[AdapterWeights, float]] = []
        for file, weight in adapter.parts:
            try:
                weighted.append((read(file.path), weight))
            except UnusableAdapter as error:
                raise UnusableAdapter(f"{file.id}: {error}") from error
        return compose(weighted, self._table, max_rank=self._max_rank, dtype=self._store.dtype)


def _failed(future: Future[_Packed]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
