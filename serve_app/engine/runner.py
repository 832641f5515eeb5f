"""One forward pass and one sampler step for a batch, every row with its own time, guidance, adapter and weight."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.lora import NO_SLOT, SlotBank
from serve_app.engine.run import Run
from serve_app.engine.sampler import advance


class Company(NamedTuple):
    """What stays the same while the same runs step together."""

    runs: list[Run]
    rows: int
    """Rows of the forward pass, padding included."""
    run_of_row: Tensor
    """[rows] which run's latents each row takes; padding repeats the first run."""
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
    def __init__(self, family: UNetFamily, bank: SlotBank, *, max_rows: int, exact: bool) -> None:
        self.family = family
        self.bank = bank
        self.max_rows = max_rows
        self.exact = exact
        self._company: Company | None = None

    def denoise(self, runs: Sequence[Run]) -> None:
        """Moves every run one step on. Nothing is changed when it raises."""
        company = self._assemble(list(runs))
        self.bank.bind(company.slots, company.weights)
        latents = torch.stack([run.latents for run in runs])
        table = torch.stack([run.schedule.table[run.step] for run in runs])
        timesteps = torch.stack([run.schedule.timesteps[run.step] for run in runs])
        inputs = (latents * table[:, 0, None, None, None])[company.run_of_row]
        answer = self.family.denoise(inputs, timesteps[company.run_of_row], company.context, company.added)
        without, towards = answer[company.negative_row], answer[company.positive_row]
        output = without + company.guidance * (towards - without)
        before = torch.stack([run.previous for run in runs])
        after, predicted = advance(latents, output, before, table, self._noise(runs))
        for run, x, x0 in zip(runs, after, predicted, strict=True):
            run.latents, run.previous = x, x0
            run.step += 1

    def forget(self) -> None:
        """Drops what is kept of the last company."""
        self._company = None

    def _noise(self, runs: Sequence[Run]) -> Tensor | None:
        """Each run's own noise from its own generator, drawn only in steps of samplers that add any."""
        if not any(run.schedule.draws_noise for run in runs):
            return None
        return torch.stack(
            [
                draw_noise(run) if float(run.schedule.table[run.step, 6]) else torch.zeros_like(run.latents)
                for run in runs
            ]
        )

    def _assemble(self, runs: list[Run]) -> Company:
        if self._company is not None and self._company.runs == runs:
            return self._company
        rows = sum(run.rows for run in runs)
        padding = self._padded(rows) - rows
        owners = [i for i, run in enumerate(runs) for _ in range(run.rows)]
        starts = [owners.index(i) for i in range(len(runs))]
        device = self.family.device
        slots = [runs[i].slot for i in owners]
        self._company = Company(
            runs=runs,
            rows=rows + padding,
            run_of_row=torch.tensor(owners + [0] * padding, device=device),
            negative_row=torch.tensor(starts, device=device),
            positive_row=torch.tensor(
                [start + run.rows - 1 for start, run in zip(starts, runs, strict=True)], device=device
            ),
            guidance=torch.tensor([run.request.guidance for run in runs], device=device).view(-1, 1, 1, 1),
            context=_pad_rows(torch.cat([run.conditioning.context for run in runs]), padding),
            added={
                name: _pad_rows(torch.cat([run.conditioning.added[name] for run in runs]), padding)
                for name in runs[0].conditioning.added
            },
            slots=slots + [NO_SLOT] * padding,
            weights=[runs[i].request.weight for i in owners] + [0.0] * padding,
        )
        return self._company

    def _padded(self, rows: int) -> int:
        """Rows in steps of four, where a row's bits do not depend on how many there are (measured: `shapes.py`)."""
        return min(self.max_rows, -(-rows // 4) * 4) if self.exact else rows


def draw_noise(run: Run) -> Tensor:
    """Unit noise of the run's latent shape from its own generator, as diffusers' pipelines draw it."""
    noise = torch.randn((1, *run.latents.shape), generator=run.generator)
    return noise[0].to(run.latents.device)


def _pad_rows(rows: Tensor, padding: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(padding, *rows.shape[1:])]) if padding else rows
