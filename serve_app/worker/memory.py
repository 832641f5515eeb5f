"""Limits the CPU threads and the GPU memory of a replica, and measures its memory."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from serve_app.domain import metrics
from serve_app.domain.metrics import MemoryUse, Metric
from serve_app.worker.executor import MemoryPart


def prepare_device(*, threads: int | None, memory_share: float | None) -> None:
    """Take as many threads (None: every core) and such a share of the card's memory (None: all) as are allowed.

    Ray counts fractions and isolates nothing, so each process caps itself.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    if memory_share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(memory_share)


class CardMemory(NamedTuple):
    """Bytes of a card: all and free by its driver, reserved and allocated by this process's torch."""

    total: int
    free: int
    reserved: int
    allocated: int


def card_gauges(device: torch.device) -> Mapping[Metric, float]:
    """Return the memory in use and in all of a card; empty for another device."""
    card = _card_memory(device)
    return {} if card is None else {metrics.GPU_MEMORY: card.total, metrics.GPU_MEMORY_USED: card.total - card.free}


def memory_parts(device: torch.device, *, weights: int, adapters: int = 0, adapter_cache: int = 0) -> list[MemoryPart]:
    """Return the memory of a worker by use. Those on a card add up to the whole card.

    The executor holds weights and adapters on its device, and the adapters' cache in the machine's memory.
    """
    card = _card_memory(device)
    uses = {MemoryUse.WEIGHTS: weights, MemoryUse.ADAPTERS: adapters}
    if card is not None:
        uses = card_uses(card, weights=weights, adapters=adapters)
    parts = [MemoryPart("cpu" if card is None else "cuda", use, size) for use, size in uses.items()]
    return [*parts, MemoryPart("cpu", MemoryUse.ADAPTER_CACHE, adapter_cache)]


def card_uses(card: CardMemory, *, weights: int, adapters: int) -> dict[MemoryUse, int]:
    """Divide a card among its uses, none below zero.

    The counters are read one after another while the card works, so that they may contradict each other a little.
    """
    rest = card.total
    uses: dict[MemoryUse, int] = {}
    for use, size in (
        (MemoryUse.FREE, card.free),
        (MemoryUse.WEIGHTS, weights),
        (MemoryUse.ADAPTERS, adapters),
        (MemoryUse.ACTIVATIONS, card.allocated - weights - adapters),
        (MemoryUse.RESERVED, card.reserved - card.allocated),
    ):
        uses[use] = min(max(size, 0), rest)
        rest -= uses[use]
    return {**uses, MemoryUse.OTHER: rest}


def _card_memory(device: torch.device) -> CardMemory | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(total, free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))
