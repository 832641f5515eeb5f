"""Finds the cheapest forward shapes at which a row's bits do not depend on the batch's other rows.

Rows never mix, but a kernel may add numbers in another order when it is given more rows, and the result then differs in
its last bit. Which row counts agree depends on the machine, so it is measured there: the same random rows go through
the denoiser at the widest shape and at narrower ones, and must come out bit for bit the same. The result is a row
multiple: batches padded to a multiple of it are exact. Where nothing narrower agrees it is the widest shape itself. A
widest shape that does not fit in the device's memory is halved: then bits may differ from those of a larger device.
"""

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import AdapterSlots, Layout
from serve_app.engine.device import is_out_of_memory
from serve_app.engine.families.family import Family
from serve_app.engine.run import BatchKey, Conditioning

ROW_COUNTS = {1: (1, 3), 2: (2, 6), 4: (4, 12), 8: (8, 24)}
"""Row multiple → row counts that must agree with the widest."""
MIN_ROWS = 2
"""A forward pass has at least the rows of one run with guidance."""


class BatchInvariance:
    """Row multiples of one base model, measured on this machine.

    Every batch key is measured, at its first use or by `Engine.warm_up`: what holds for one shape need not hold for the
    next. It takes the time of two to four steps of the widest batch (28 to 52 rows where that has 16), once per
    process.
    """

    def __init__(self, family: Family, adapter_slots: AdapterSlots, *, max_rows: int, static: bool) -> None:
        self._family = family
        self._adapter_slots = adapter_slots
        self._max_rows = max_rows
        self._static = static
        self._row_multiples: dict[BatchKey, int] = {}
        self._row_limits: dict[BatchKey, int] = {}
        """The most rows for batch keys whose widest shape did not fit in memory."""
        self._ranks_agree: dict[tuple[BatchKey, int], bool] = {}

    def row_multiple(self, batch_key: BatchKey, like: Conditioning) -> int:
        """Return the number to whose multiples rows are padded. `like` shows which other inputs the denoiser takes."""
        if batch_key not in self._row_multiples:
            self._row_multiples[batch_key] = self._measure(batch_key, like)
        return self._row_multiples[batch_key]

    def limit_rows(self, batch_key: BatchKey, rows: int) -> bool:
        """Halve the widest shape, which did not fit in memory, and measure again.

        False when `rows` rows are no narrower.
        """
        widest = min(self._widest(batch_key), self._row_multiples.get(batch_key, self._max_rows))
        if widest <= max(rows, MIN_ROWS):
            return False
        self._row_limits[batch_key] = max(widest // 2, MIN_ROWS)
        self._row_multiples.pop(batch_key, None)
        return True

    def ranks_agree(self, batch_key: BatchKey, like: Conditioning) -> bool:
        """Return whether a low-rank adapter gives the same bits at a higher rank's width."""
        if self._static:
            return True  # every adapter is always computed at the widest rank
        known = (batch_key, self._adapter_slots.layout.rank)
        if known not in self._ranks_agree:
            rows = min(4, self._widest(batch_key))
            probe = Probe(self._family, self._adapter_slots, batch_key, like, rows)
            layouts = self._adapter_slots.lowest_layout, self._adapter_slots.layout
            low, high = (probe.output(rows, layout) for layout in layouts)
            self._ranks_agree[known] = torch.equal(low, high)
        return self._ranks_agree[known]

    def _measure(self, batch_key: BatchKey, like: Conditioning) -> int:
        while True:
            try:
                return self._find_row_multiple(batch_key, like)
            except Exception as error:
                if not is_out_of_memory(error) or not self.limit_rows(batch_key, MIN_ROWS):
                    raise

    def _find_row_multiple(self, batch_key: BatchKey, like: Conditioning) -> int:
        widest = self._widest(batch_key)
        layout = self._adapter_slots.widest_layout
        probe = Probe(self._family, self._adapter_slots, batch_key, like, widest)
        expected = probe.output(widest, layout)
        for row_multiple, counts in ROW_COUNTS.items():
            if self._static:
                counts = static_widths(widest, least=row_multiple)
            counts = [rows for rows in counts if rows < widest]
            if counts and all(torch.equal(probe.output(rows, layout), expected[:rows]) for rows in counts):
                return row_multiple
        return widest

    def _widest(self, batch_key: BatchKey) -> int:
        return self._row_limits.get(batch_key, self._max_rows)


class Probe:
    """Random rows of one batch key, each with a random adapter."""

    def __init__(
        self, family: Family, adapter_slots: AdapterSlots, batch_key: BatchKey, like: Conditioning, max_rows: int
    ) -> None:
        self._family = family
        self._adapter_slots = adapter_slots
        self._max_rows = max_rows
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(max_rows, *shape, generator=generator).to(family.device)

        def resembling(tensor: Tensor) -> Tensor:
            """Return noise; masks and ids, whose numbers have a meaning, are repeated instead."""
            if tensor.is_floating_point():
                return noise(*tensor.shape[1:]).to(tensor.dtype)
            return tensor[:1].expand(max_rows, *tensor.shape[1:])

        self._latents = noise(*batch_key.latent_shape)
        self._timesteps = torch.linspace(999, 1, max_rows, device=family.device)
        self._conditioning = Conditioning(
            resembling(like.context), {name: resembling(tensor) for name, tensor in like.added.items()}
        )

    def output(self, rows: int, layout: Layout) -> Tensor:
        """Return the denoiser's output for the first `rows` rows, their adapters bound by `layout`."""
        self._adapter_slots.bind_random(rows, self._max_rows, layout)
        context, added = self._conditioning
        first = Conditioning(context[:rows], {name: tensor[:rows] for name, tensor in added.items()})
        return self._family.denoise(self._latents[:rows], self._timesteps[:rows], first)


def static_widths(widest: int, *, least: int = 1) -> list[int]:
    """Return row counts of compiled forward passes: powers of two from `least` up, then the widest."""
    return [1 << power for power in range(widest.bit_length()) if least <= 1 << power < widest] + [widest]
