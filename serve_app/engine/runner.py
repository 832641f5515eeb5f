"""One forward pass and one sampler step for a batch, every row with its own time, guidance, adapter and weight."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from serve_app.engine.exactness import Exactness, Rehearsal, static_widths
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.lora import NO_SLOT, SlotBank
from serve_app.engine.run import BatchKey, Run
from serve_app.engine.sampler import advance


class Company(NamedTuple):
    """What stays the same while the same runs step together. Padding rows repeat the first, without an adapter."""

    runs: list[Run]
    run_of_row: Tensor
    """[rows] whose latents and time each row takes."""
    negative_row: Tensor
    """[runs] the row without the prompt; without guidance, the run's only row."""
    positive_row: Tensor
    """[runs]"""
    guidance: Tensor
    """[runs, 1, 1, 1]"""
    context: Tensor
    added: dict[str, Tensor]
    slots: list[int]
    weights: list[float]


class Runner:
    def __init__(self, family: UNetFamily, bank: SlotBank, *, max_rows: int, exact: bool, static: bool) -> None:
        self.family = family
        self.bank = bank
        self.max_rows = max_rows
        self.static = static
        """Few forward shapes, for compiled ones: rows are padded to the next of `static_widths`."""
        self.exactness = Exactness(family, bank, max_rows=max_rows, static=static) if exact else None
        self._company: Company | None = None

    def denoise(self, runs: Sequence[Run]) -> None:
        """Moves every run one step on; a run is changed only once its own step has been computed."""
        for company in self._companies(runs):
            self._step(company)

    def warm_up(self, run: Run) -> None:
        """Does now what batches of this run's key would else do at first use: measure exact shapes, compile all shapes."""
        if self.exactness is not None:
            self.exactness.granule(run.key, run.conditioning)  # goes through every static width
        elif self.static:
            rehearsal = Rehearsal(self.family, self.bank, run.key, run.conditioning, self.max_rows)
            for rows in static_widths(self.max_rows):
                rehearsal.answer(rows, self.bank.widest_layout)

    def forget(self) -> None:
        """Drops what is kept of the last company."""
        self._company = None

    def pads_less(self, key: BatchKey, rows: int) -> bool:
        """After `rows` rows of a key did not fit in memory: whether they can do with less padding, as they will from now on."""
        return self.exactness is not None and self.exactness.narrow(key, rows)

    def _step(self, company: Company) -> None:
        runs = company.runs
        latents = torch.stack([run.latents for run in runs])
        table = torch.stack([run.schedule.table[run.step] for run in runs])
        timesteps = torch.stack([run.schedule.timesteps[run.step] for run in runs])
        inputs = latents * table[:, 0, None, None, None]
        self.bank.bind(company.slots, company.weights)
        answer = self.family.denoise(
            inputs[company.run_of_row], timesteps[company.run_of_row], company.context, company.added
        )
        without, towards = answer[company.negative_row], answer[company.positive_row]
        output = without + company.guidance * (towards - without)  # Ho & Salimans 2022
        before = torch.stack([run.previous for run in runs])
        after, predicted = advance(latents, output, before, table, _noise(runs))
        for run, x, x0 in zip(runs, after, predicted, strict=True):
            run.latents, run.previous = x, x0
            run.step += 1

    def _companies(self, runs: Sequence[Run]) -> Iterator[Company]:
        """The runs as one company, or one per rank where this machine's bits depend on the rank beside them."""
        if self._company is not None and self._company.runs == list(runs):
            yield self._company
            return
        for together in self._split_by_rank(runs):
            self._company = self._assemble(together)
            yield self._company

    def _split_by_rank(self, runs: Sequence[Run]) -> list[list[Run]]:
        ranks = {run.slot: self.bank.rank_of((run.slot,)) for run in runs}
        mixed = len(set(ranks.values()) - {0}) > 1
        if not mixed or self.exactness is None or self.exactness.ranks_agree(runs[0].key, runs[0].conditioning):
            return [list(runs)]
        in_order = sorted(runs, key=lambda run: ranks[run.slot])
        return [list(group) for _, group in groupby(in_order, key=lambda run: ranks[run.slot])]

    def _assemble(self, runs: list[Run]) -> Company:
        owners = [i for i, run in enumerate(runs) for _ in range(run.rows)]
        starts = [owners.index(i) for i in range(len(runs))]
        ends = [start + run.rows for start, run in zip(starts, runs, strict=True)]
        rows = len(owners)
        padding = self._padded(rows, runs[0]) - rows
        device = self.family.device
        return Company(
            runs=runs,
            run_of_row=torch.tensor(owners + [0] * padding, device=device),
            negative_row=torch.tensor(starts, device=device),
            positive_row=torch.tensor([end - 1 for end in ends], device=device),
            guidance=torch.tensor([run.request.guidance for run in runs], device=device).view(-1, 1, 1, 1),
            context=_pad(torch.cat([run.conditioning.context for run in runs]), padding),
            added={
                name: _pad(torch.cat([run.conditioning.added[name] for run in runs]), padding)
                for name in runs[0].conditioning.added
            },
            slots=[runs[i].slot for i in owners] + [NO_SLOT] * padding,
            weights=[runs[i].request.weight for i in owners] + [0.0] * padding,
        )

    def _padded(self, rows: int, like: Run) -> int:
        assert rows <= self.max_rows, f"a batch of {rows} rows, at most {self.max_rows}"
        if self.exactness is not None:
            granule = self.exactness.granule(like.key, like.conditioning)
            rows = -(-rows // granule) * granule
        rows = min(rows, self.max_rows)
        return next(width for width in static_widths(self.max_rows) if width >= rows) if self.static else rows


def draw_noise(run: Run) -> Tensor:
    """Unit noise of the run's latent shape from its own generator, as diffusers' pipelines draw it."""
    noise = torch.randn((1, *run.latents.shape), generator=run.generator)
    return noise[0].to(run.latents.device)


def _noise(runs: Sequence[Run]) -> Tensor | None:
    """Each run's own noise, drawn only in the steps whose sampler adds any."""
    if not any(run.schedule.draws_noise for run in runs):
        return None
    return torch.stack(
        [draw_noise(run) if run.schedule.noisy[run.step] else torch.zeros_like(run.latents) for run in runs]
    )


def _pad(rows: Tensor, padding: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(padding, *rows.shape[1:])]) if padding else rows
