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
from serve_app.engine.lora import SlotBank
from serve_app.engine.memory import is_out_of_memory
from serve_app.engine.run import BatchKey, Conditioning

PROBES = {1: (1, 3), 2: (2, 6), 4: (4, 12), 8: (8, 24)}
"""Granule → row counts that must agree with the widest."""
NARROWEST = 2
"""Rows of one run with guidance."""
MEASURED_SHAPES = 4
"""Latent shapes measured per process; later ones take the coarsest granule found, which on every machine seen was the same."""


class Exactness:
    """What is known so far about one base model on this machine."""

    def __init__(self, family: UNetFamily, bank: SlotBank, max_rows: int) -> None:
        self._family = family
        self._bank = bank
        self._max_rows = max_rows
        self._granules: dict[BatchKey, int] = {}
        self._fitting: dict[BatchKey, int] = {}
        """Row counts for keys whose widest shape did not fit in memory."""
        self._ranks_agree: dict[tuple[BatchKey, int], bool] = {}

    def granule(self, key: BatchKey, like: Conditioning) -> int:
        """Rows are padded to a multiple of this. `like` shows which further inputs the denoiser takes."""
        if key not in self._granules:
            if len(self._granules) >= MEASURED_SHAPES and key not in self._fitting:
                return max(self._granules.values())
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
        known = (key, self._bank.layout.rank)
        if known not in self._ranks_agree and len(self._ranks_agree) >= MEASURED_SHAPES:
            return all(self._ranks_agree.values())
        if known not in self._ranks_agree:
            probe = _Probe(self._family, self._bank, key, like, self._widest(key))
            self._ranks_agree[known] = probe.ranks_agree()
        return self._ranks_agree[known]

    def _measured(self, key: BatchKey, like: Conditioning) -> int:
        while True:
            try:
                return _Probe(self._family, self._bank, key, like, self._widest(key)).granule()
            except Exception as error:
                if not is_out_of_memory(error) or not self.narrow(key, NARROWEST):
                    raise

    def _widest(self, key: BatchKey) -> int:
        return self._fitting.get(key, self._max_rows)


class _Probe:
    """Random rows of one batch key, each with a random adapter of the lowest rank bucket."""

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

    def granule(self) -> int:
        widest = self._answer(self._max_rows)
        for granule, counts in PROBES.items():
            counts = [rows for rows in counts if rows < self._max_rows]
            if counts and all(torch.equal(self._answer(rows), widest[:rows]) for rows in counts):
                return granule
        return self._max_rows

    def ranks_agree(self) -> bool:
        rows = min(4, self._max_rows)
        return torch.equal(self._answer(rows), self._answer(rows, wide=True))

    def _answer(self, rows: int, *, wide: bool = False) -> Tensor:
        self._bank.bind_noise(rows, self._max_rows, wide=wide)
        added = {name: tensor[:rows] for name, tensor in self._added.items()}
        return self._family.denoise(self._latents[:rows], self._timesteps[:rows], self._context[:rows], added)
