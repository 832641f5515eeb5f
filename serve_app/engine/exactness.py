"""Finds the cheapest forward shapes at which a row's bits do not depend on its company.

A row never reads its neighbours, but a kernel may add numbers in another order when it is given more rows, and the result
then differs in its last bit. Which row counts agree is a fact of the machine, so it is measured there: the same random rows
go through the denoiser at the widest shape and at narrower ones, and must come out bit for bit the same. The answer is a
granule: batches padded to a multiple of it are exact. Where nothing narrower agrees it is the widest shape itself. A widest
shape that does not fit in the device's memory gives way to half of it: then bits may differ from those of a larger device.
"""

import torch
from torch import Tensor

from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.layout import Layout
from serve_app.engine.lora import SlotBank
from serve_app.engine.memory import is_out_of_memory
from serve_app.engine.run import BatchKey, Conditioning

PROBES = {1: (1, 3), 2: (2, 6), 4: (4, 12), 8: (8, 24)}
"""Granule → row counts that must agree with the widest."""
NARROWEST = 2
"""Rows of one run with guidance."""


class Exactness:
    """What is known so far about one base model on this machine.

    Every batch key is measured, at its first use or by `Engine.warm_up`: what holds for one shape need not hold for the
    next. It takes the time of two to four steps of the widest batch (28 to 52 rows where that has 16), once per process.
    """

    def __init__(self, family: UNetFamily, bank: SlotBank, *, max_rows: int, static: bool) -> None:
        self._family = family
        self._bank = bank
        self._max_rows = max_rows
        self._static = static
        self._granules: dict[BatchKey, int] = {}
        self._fitting: dict[BatchKey, int] = {}
        """Row counts for keys whose widest shape did not fit in memory."""
        self._ranks_agree: dict[tuple[BatchKey, int], bool] = {}

    def granule(self, key: BatchKey, like: Conditioning) -> int:
        """Rows are padded to a multiple of this. `like` shows which further inputs the denoiser takes."""
        if key not in self._granules:
            self._granules[key] = self._measured(key, like)
        return self._granules[key]

    def narrow(self, key: BatchKey, rows: int) -> bool:
        """After a shape did not fit in memory: measure the key again, half as wide. False when `rows` rows are no narrower."""
        widest = min(self._widest(key), self._granules.get(key, self._max_rows))
        if widest <= max(rows, NARROWEST):
            return False
        self._fitting[key] = max(widest // 2, NARROWEST)
        self._granules.pop(key, None)
        return True

    def ranks_agree(self, key: BatchKey, like: Conditioning) -> bool:
        """Whether a low-rank adapter may be computed at the width of a higher one beside it."""
        if self._static:
            return True  # every adapter is always computed at the widest rank
        known = (key, self._bank.layout.rank)
        if known not in self._ranks_agree:
            rows = min(4, self._widest(key))
            rehearsal = Rehearsal(self._family, self._bank, key, like, rows)
            low, high = (rehearsal.answer(rows, layout) for layout in (self._bank.lowest_layout, self._bank.layout))
            self._ranks_agree[known] = torch.equal(low, high)
        return self._ranks_agree[known]

    def _measured(self, key: BatchKey, like: Conditioning) -> int:
        while True:
            try:
                return self._find_granule(key, like)
            except Exception as error:
                if not is_out_of_memory(error) or not self.narrow(key, NARROWEST):
                    raise

    def _find_granule(self, key: BatchKey, like: Conditioning) -> int:
        widest = self._widest(key)
        layout = self._bank.widest_layout
        rehearsal = Rehearsal(self._family, self._bank, key, like, widest)
        expected = rehearsal.answer(widest, layout)
        for granule, counts in PROBES.items():
            if self._static:
                counts = static_widths(widest, least=granule)
            counts = [rows for rows in counts if rows < widest]
            if counts and all(torch.equal(rehearsal.answer(rows, layout), expected[:rows]) for rows in counts):
                return granule
        return widest

    def _widest(self, key: BatchKey) -> int:
        return self._fitting.get(key, self._max_rows)


class Rehearsal:
    """Random rows of one batch key, each with a random adapter."""

    def __init__(self, family: UNetFamily, bank: SlotBank, key: BatchKey, like: Conditioning, max_rows: int) -> None:
        self._family = family
        self._bank = bank
        self._max_rows = max_rows
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(max_rows, *shape, generator=generator).to(family.device)

        self._latents = noise(family.unet.config.in_channels, key.latent_height, key.latent_width)
        self._timesteps = torch.linspace(999, 1, max_rows, device=family.device)
        self._context = noise(*like.context.shape[1:]).to(like.context.dtype)
        self._added = {name: noise(*tensor.shape[1:]).to(tensor.dtype) for name, tensor in like.added.items()}

    def answer(self, rows: int, layout: Layout) -> Tensor:
        """The denoiser's answer for the first `rows` rows, their adapters bound by `layout`."""
        self._bank.bind_noise(rows, self._max_rows, layout)
        added = {name: tensor[:rows] for name, tensor in self._added.items()}
        return self._family.denoise(self._latents[:rows], self._timesteps[:rows], self._context[:rows], added)


def static_widths(widest: int, *, least: int = 1) -> list[int]:
    """The row counts of compiled forward passes: powers of two from `least` up, then the widest."""
    return [1 << power for power in range(widest.bit_length()) if least <= 1 << power < widest] + [widest]
