"""Finds the cheapest forward passes in which a row's bits do not depend on the batch's other rows.

Rows never mix, but a kernel may add numbers in another order when it is given more rows, or more threads, and the
result then differs in its last bit. Which shapes agree depends on the machine, so it is measured there: random rows go
through passes at shuffled places, and must come out bit for bit as they did before.

On a CPU, through every pass that a batch may be divided into. The result is a row multiple, to whose multiples batches
are padded, how many passes may run side by side, and whether each takes one thread only. Where nothing narrower agrees
it is the widest shape itself.

On a GPU few shapes agree, and one pass of a few rows fills the card. So all passes of a key have the same shape: as many
rows as `FLOPS_PER_PROCESSOR` asks for, one pass after the other, which a row's neighbours cannot change but by the place
of the row, and that is measured.

A shape that does not fit in the device's memory is halved: then bits may differ from those of a larger device. Where not
even a single shape keeps them, the log warns of it at each start.
"""

import hashlib
import logging
import math
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from serve_app.engine.adapter_slots import NOTHING, RANK_BUCKETS, AdapterSlots, Layout
from serve_app.engine.device import is_out_of_memory
from serve_app.engine.families.family import Family
from serve_app.engine.findings import Findings
from serve_app.engine.gathered_rows import Sizes
from serve_app.engine.lanes import Lanes
from serve_app.engine.run import BatchKey, Conditioning

log = logging.getLogger(__name__)

ROW_MULTIPLES = (1, 2, 4, 8)
MIN_ROWS = 2
"""A forward pass on a CPU has at least the rows of one run with guidance."""
FLOPS_PER_PROCESSOR = 2e11
"""A pass on a GPU has so many FLOPs for each of its multiprocessors, or the most rows: more rows are hardly faster."""
PROCESSORS = 132
"""An H100 has so many multiprocessors, and a device that does not tell is taken for one."""


class Division(NamedTuple):
    """How the rows of a batch are divided into forward passes."""

    row_multiple: int
    lanes: int
    """How many passes at most run side by side."""
    single: bool = False
    """Every pass takes one thread, also alone: where operators that several share add by a row's place."""
    fixed: bool = False
    """Every pass has `row_multiple` rows, and they are computed one after the other."""
    strided_apart: bool = False
    """Convolutions with strides take one row at a time (`LoRAConv.strided_apart`)."""

    def passes(self, rows: int) -> list[int]:
        """Return the rows of each pass, with padding, as even as the row multiple allows."""
        units = -(-rows // self.row_multiple)
        if self.fixed:
            return [self.row_multiple] * units
        lanes = min(self.lanes, units)
        return [self.row_multiple * (units // lanes + (i < units % lanes)) for i in range(lanes)]

    def compared(self, widest: int) -> list[int]:
        """Return the passes that all others are compared with: of the widest batch, or two where all are alike."""
        return self.passes(2 * self.row_multiple if self.fixed else widest)

    def all_passes(self, widest: int) -> Iterator[list[int]]:
        """Yield the passes of batches of up to `widest` rows, until each size has come with each share of threads."""
        if self.fixed:
            yield self.compared(widest)
            return
        known: set[tuple[int, int]] = set()
        for most in range(self.row_multiple, widest + self.row_multiple, self.row_multiple):
            passes = self.passes(min(most, widest))
            shapes = {(rows, len(passes)) for rows in passes}
            if not shapes <= known:
                yield passes
            known |= shapes


WHOLE = Division(1, 1)
"""Every pass is computed as it is."""
Factored = frozenset[Sizes]
"""The sizes of an adapter's LoKr factors: their products have shapes of their own, which are measured for each."""


class BatchInvariance:
    """Divisions for one base model, measured on this machine and kept in its findings.

    Every batch key is measured, at its first use or by `Engine.warm_up`: what holds for one shape need not hold for the
    next. It takes the time of five to ten steps of the widest batch, and other work may come between its passes.
    """

    def __init__(
        self, family: Family, adapter_slots: AdapterSlots, lanes: Lanes, findings: Findings, *, max_rows: int
    ) -> None:
        self._family = family
        self._adapter_slots = adapter_slots
        self._lanes = lanes
        self._findings = findings
        self._max_rows = max_rows
        self._is_fixed = family.device.type != "cpu"
        self._divisions: dict[BatchKey, Division] = {}
        self._measuring: dict[BatchKey, Iterator[None]] = {}
        """What is measured at present: each item is one more forward pass."""
        self._row_limits: dict[BatchKey, int] = {}
        """The most rows for batch keys whose widest shape did not fit in memory."""
        self._ranks_agree: dict[tuple[BatchKey, int], bool] = {}
        self._agree: dict[tuple[BatchKey, Factored], bool] = {}
        """Whether rows with such factors keep their bits in a key's division, which `NOTHING.factored` settles."""

    def division(self, batch_key: BatchKey, like: Conditioning) -> Division:
        """Return how batches of a key are divided. `like` shows which other inputs the denoiser takes."""
        self.measure(batch_key, like, NOTHING.factored)
        return self._divisions[batch_key]

    def measure(self, batch_key: BatchKey, like: Conditioning, factored: Factored, within_s: float = math.inf) -> bool:
        """Compute one pass, and more until `within_s` seconds are over; return whether a key's division is known, and
        whether rows with such factors keep their bits in it."""
        began = time.monotonic()
        while (batch_key, factored) not in self._agree:
            self._compute_pass(batch_key, like, factored)
            if time.monotonic() - began >= within_s:
                break
        return (batch_key, factored) in self._agree

    def rows_to_measure(self, batch_key: BatchKey) -> int:
        """Return how many rows at least must be computed before a key's division is known."""
        if batch_key in self._divisions or self._findings.found(self._name(batch_key), int) is not None:
            return 0
        if self._is_fixed:
            return 1 + 2 + 2
        widest = self._widest(batch_key)
        first = next(self._candidates(widest))
        return sum(map(sum, [first.passes(widest), *first.all_passes(widest)]))

    def limit_rows(self, batch_key: BatchKey, rows: int) -> bool:
        """Halve the widest shape, which did not fit in memory, and measure again.

        False when `rows` rows are no narrower, or a pass of a fixed shape has one row.
        """
        known = self._divisions.get(batch_key)
        widest = self._widest(batch_key) if known is None else min(self._widest(batch_key), known.row_multiple)
        if widest <= (1 if self._is_fixed else max(rows, MIN_ROWS)):
            return False
        self._row_limits[batch_key] = max(widest // 2, 1 if self._is_fixed else MIN_ROWS)
        self._divisions.pop(batch_key, None)
        self._measuring.pop(batch_key, None)
        self._agree = {known: agree for known, agree in self._agree.items() if known[0] != batch_key}
        return True

    def factors_agree(self, batch_key: BatchKey, like: Conditioning, factored: Factored) -> bool:
        """Return whether rows with such factors keep their bits in any company."""
        return self.measure(batch_key, like, factored) and self._agree[batch_key, factored]

    def ranks_agree(self, batch_key: BatchKey, like: Conditioning) -> bool:
        """Return whether a low-rank adapter gives the same bits at the width of every higher rank in use."""
        highest = self._adapter_slots.layout.rank
        if (batch_key, highest) not in self._ranks_agree:
            rows = min(4, self._widest(batch_key))
            division = self.division(batch_key, like)
            name = f"{self._name(batch_key)}, ranks to {highest}"
            agree = self._findings.found(name, bool)
            if agree is None:
                probe = self._probe(batch_key, like, rows + division.row_multiple)
                passes = probe.in_order(division.passes(rows))
                ranks = [rank for rank in RANK_BUCKETS if rank <= highest]
                layouts = map(self._adapter_slots.layout_at, ranks)
                low, *higher = (probe.output(passes, layout, division) for layout in layouts)
                agree = all(torch.equal(low, each) for each in higher)
                self._findings.keep(name, agree)
            self._ranks_agree[batch_key, highest] = agree
        return self._ranks_agree[batch_key, highest]

    def _compute_pass(self, batch_key: BatchKey, like: Conditioning, factored: Factored) -> None:
        if batch_key not in self._measuring:
            find = self._find if batch_key not in self._divisions else partial(self._find_agreement, factored)
            self._measuring[batch_key] = find(batch_key, like)
        try:
            if next(self._measuring[batch_key], True):
                del self._measuring[batch_key]
        except Exception as error:
            del self._measuring[batch_key]
            if not is_out_of_memory(error) or not self.limit_rows(batch_key, MIN_ROWS):
                raise

    def _find(self, batch_key: BatchKey, like: Conditioning) -> Generator[None]:
        name = self._name(batch_key)
        fixed = self._rows_of_pass(batch_key, like) if self._is_fixed else 0
        candidates = list(self._candidates(self._widest(batch_key), fixed))
        found = self._findings.found(name, int)
        if found is None or not 0 <= found <= len(candidates):
            found = yield from self._first_exact(batch_key, like, candidates, NOTHING.factored)
            self._findings.keep(name, found)
        if found == len(candidates):
            log.warning("%s: on this device a seed's image may depend on the other images of its batch", name)
        self._divisions[batch_key] = candidates[min(found, len(candidates) - 1)]
        self._agree[batch_key, NOTHING.factored] = True

    def _find_agreement(self, factored: Factored, batch_key: BatchKey, like: Conditioning) -> Generator[None]:
        digest = hashlib.sha256(repr(sorted(each._replace(number=0) for each in factored)).encode()).hexdigest()
        name, division = f"{self._name(batch_key)}, factors {digest[:16]}", self._divisions[batch_key]
        agree = self._findings.found(name, bool)
        if agree is None:
            agree = not (yield from self._first_exact(batch_key, like, [division], factored))
            self._findings.keep(name, agree)
        self._agree[batch_key, factored] = agree

    def _rows_of_pass(self, batch_key: BatchKey, like: Conditioning) -> int:
        """Return how many rows fill a pass of a GPU, by the FLOPs of one, which do not depend on the clock."""
        name = f"{self._name(batch_key)}, rows of a pass"
        rows = self._findings.found(name, int)
        if rows is None:
            with FlopCounterMode(display=False) as counter:
                self._probe(batch_key, like, 1).output([torch.zeros(1, dtype=torch.long)], NOTHING)
            wanted = FLOPS_PER_PROCESSOR * _processors(self._family.device) / max(1, counter.get_total_flops())
            rows = 2 ** max(0, math.ceil(math.log2(wanted)))
            self._findings.keep(name, rows)
        return min(rows, self._widest(batch_key))

    def _candidates(self, widest: int, fixed: int = 0) -> Iterator[Division]:
        """Yield divisions in the order of preference: all threads first, then less padding, then more lanes."""
        if fixed:
            yield from (Division(fixed, 1, fixed=True, strided_apart=apart) for apart in (False, True))
            yield Division(1, 1, fixed=True)
            return
        lane_counts = sorted({self._lanes.count, 1}, reverse=True)
        for row_multiple, lanes in product((each for each in ROW_MULTIPLES if each < widest), lane_counts):
            yield Division(row_multiple, lanes)
        yield Division(widest, 1)
        for row_multiple in (
            (*(each for each in ROW_MULTIPLES if each < widest), widest) if self._lanes.count > 1 else ()
        ):
            yield Division(row_multiple, self._lanes.count, single=True)

    def _first_exact(
        self, batch_key: BatchKey, like: Conditioning, candidates: Sequence[Division], factored: Factored
    ) -> Generator[None, None, int]:
        """Return the place of the first division that keeps bits, or how many there are where none does.

        It yields after each pass.
        """
        widest = self._widest(batch_key)
        probe = self._probe(batch_key, like, 2 * widest + max(ROW_MULTIPLES))
        layout = self._adapter_slots.widest_layout._replace(factored=factored)
        whole: dict[tuple[bool, int, tuple[int, ...]], Tensor] = {}
        for place, division in enumerate(candidates):
            passes = tuple(division.compared(widest))
            key = division.single, division.strided_apart, passes
            if key not in whole:
                whole[key] = probe.output(probe.in_order(passes), layout, division)
                yield
            for each in division.all_passes(widest):
                is_exact = probe.keeps(whole[key], each, layout, division)
                yield
                if not is_exact:
                    break
            else:
                return place
        return len(candidates)

    def _probe(self, batch_key: BatchKey, like: Conditioning, rows: int) -> "Probe":
        return Probe(self._family, self._adapter_slots, self._lanes, batch_key, like, rows)

    def _widest(self, batch_key: BatchKey) -> int:
        return self._row_limits.get(batch_key, self._max_rows)

    def _name(self, batch_key: BatchKey) -> str:
        """Return the name of a batch key's findings, which base models of one structure share."""
        sides = "x".join(str(side) for side in batch_key.latent_shape)
        return f"{sides}, {batch_key.context_length} tokens, {self._widest(batch_key)} rows"


class Probe:
    """Random rows of one batch key, each with a random adapter."""

    def __init__(
        self,
        family: Family,
        adapter_slots: AdapterSlots,
        lanes: Lanes,
        batch_key: BatchKey,
        like: Conditioning,
        max_rows: int,
    ) -> None:
        self._family = family
        self._adapter_slots = adapter_slots
        self._lanes = lanes
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

    def in_order(self, passes: Sequence[int]) -> Sequence[Tensor]:
        """Return which rows each pass takes: the first, in their order."""
        return torch.arange(sum(passes)).split(list(passes))

    def keeps(self, whole: Tensor, passes: Sequence[int], layout: Layout, division: Division) -> bool:
        """Return whether some of the rows of `whole`, shuffled over such passes, come out as they are there."""
        rows = torch.randperm(len(whole), generator=torch.Generator().manual_seed(sum(passes)))[: sum(passes)]
        output = self.output(rows.split(list(passes)), layout, division)
        return torch.equal(output, whole[rows.to(whole.device)])

    def output(self, passes: Sequence[Tensor], layout: Layout, division: Division = WHOLE) -> Tensor:
        """Return the denoiser's output for the rows of each pass side by side, their adapters bound by `layout`."""
        self._adapter_slots.convolve(strided_apart=division.strided_apart)
        if division.fixed:
            return torch.cat([self._alone(rows, layout) for rows in passes])
        for lane, rows in enumerate(passes):
            self._adapter_slots.bind_random(rows.tolist(), self._max_rows, layout, lane=lane)
        return self._lanes.run(
            [partial(self._forward, lane, rows) for lane, rows in enumerate(passes)], single=division.single
        )

    def _alone(self, rows: Tensor, layout: Layout) -> Tensor:
        self._adapter_slots.bind_random(rows.tolist(), self._max_rows, layout)
        return self._forward(0, rows)

    def _forward(self, lane: int, rows: Tensor) -> Tensor:
        rows = rows.to(self._latents.device)
        context, added = self._conditioning.context, self._conditioning.added
        chosen = Conditioning(context[rows], {name: tensor[rows] for name, tensor in added.items()})
        return self._family.denoise(self._latents[rows], self._timesteps[rows], chosen, lane=lane)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS
