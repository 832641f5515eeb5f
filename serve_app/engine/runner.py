"""Runs one pass of the denoiser and sampler update of a batch; rows differ in time, guidance, adapter, scale."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.adapter_slots import NO_SLOT, AdapterSlots
from serve_app.engine.batch_invariance import BatchInvariance, Division, Probe
from serve_app.engine.device import upload
from serve_app.engine.families.family import Family
from serve_app.engine.findings import Findings
from serve_app.engine.graphs import step_graphs
from serve_app.engine.lanes import Lanes
from serve_app.engine.run import BatchKey, Conditioning, KeptImage, Run
from serve_app.engine.sampler import advance


class ForwardPass(NamedTuple):
    """Some of a batch's rows. Padding rows repeat the batch's first, without an adapter."""

    run_of_row: Tensor
    """[rows] the run whose latents and time each row takes."""
    conditioning: Conditioning
    slots: list[int]
    scales: list[float]


class ForwardBatch(NamedTuple):
    """Inputs that stay the same while the same runs step together, and guidance acts on the same of them."""

    runs: list[Run]
    rows: list[int]
    """How many each run has."""
    passes: list[ForwardPass]
    """Each is computed in a lane of its own."""
    sides: Tensor
    """[2 · runs] each run's row of the negative prompt, then those of the positive; without guidance both are one."""
    guidance: Tensor
    """[runs, 1, …]"""


class Runner:
    """Moves runs of one base model on together: one pass of the denoiser for all, then each run's own sampler.

    The pass is computed in as many lanes as are worth it.
    """

    def __init__(
        self, family: Family, adapter_slots: AdapterSlots, findings: Findings, *, max_rows: int, exact: bool
    ) -> None:
        self.family = family
        self.adapter_slots = adapter_slots
        self.max_rows = max_rows
        self.lanes = Lanes(len(family.lanes))
        self.invariance = (
            BatchInvariance(family, adapter_slots, self.lanes, findings, max_rows=max_rows) if exact else None
        )
        self.graphs = step_graphs(family, adapter_slots, max_rows=max_rows)
        self._last_batch: ForwardBatch | None = None

    def denoise(self, runs: Sequence[Run]) -> None:
        """Move every run on by one pass of the denoiser. A run changes only once its own pass has been computed."""
        for batch in self._forward_batches(runs):
            self._step(batch)
        if any(run.is_done for run in runs):
            self._last_batch = None  # an idle engine keeps no inputs

    def try_out(self, run: Run) -> tuple[float, Tensor]:
        """Compute a pass of the run's rows, each with a random adapter, from random latents, always the same.

        Return how many seconds at least the measuring of its key will take, and the output [rows, channels, …].
        """
        probe = Probe(self.family, self.adapter_slots, self.lanes, run.batch_key, run.conditioning, run.rows)
        began = time.monotonic()
        output = probe.output(probe.in_order([run.rows]), self.adapter_slots.widest_layout).cpu()
        rows = 0 if self.invariance is None else self.invariance.rows_to_measure(run.batch_key)
        return (time.monotonic() - began) / run.rows * rows, output

    def measure(self, runs: Sequence[Run], *, within_s: float = math.inf) -> bool:
        """Begin passes that measure the runs' key for at most `within_s` seconds; return whether they can be stepped."""
        key, like, slots = runs[0].batch_key, runs[0].conditioning, {run.slot for run in runs}
        return self.invariance is None or all(
            self.invariance.measure(key, like, self.adapter_slots.factored(slot), within_s=within_s) for slot in slots
        )

    def close(self) -> None:
        self.lanes.close()

    def invalidate(self) -> None:
        """Drop the inputs kept from the last batch, and captured graphs."""
        self._last_batch = None
        if self.graphs is not None:
            self.graphs.clear()

    def pads_less(self, batch_key: BatchKey, rows: int) -> bool:
        """Reduce the padding of a key of which `rows` rows did not fit in memory.

        False where there is none to spare.
        """
        return self.invariance is not None and self.invariance.limit_rows(batch_key, rows)

    def _step(self, batch: ForwardBatch) -> None:
        runs = batch.runs
        size = max(run.schedule.size for run in runs)
        state = [torch.stack([_remembered(run, i) for run in runs]) for i in range(size)]
        table = torch.stack([run.schedule.table[run.step, :size, : 2 + size] for run in runs])
        scale = torch.stack([run.schedule.inputs[run.step, 0] for run in runs])
        timesteps = torch.stack([run.schedule.timesteps[run.step] for run in runs])
        inputs = state[0] * _per_run(scale, state[0].dim() - 1)
        output = self._output(batch.passes, self._division(runs[0]), inputs, timesteps)
        negative, positive = output[batch.sides].chunk(2)
        guided = negative + batch.guidance * (positive - negative)  # Ho & Salimans 2022
        drawing = [(run.generator, run.generator.get_state()) for run in runs if run.schedule.noisy[run.step]]
        try:
            after = advance(state, guided, table, _noise(runs))
            _keep(runs, after[0])
        except Exception:
            for generator, before in drawing:  # the pass is tried again, with the same noise
                generator.set_state(before)
            raise
        for i, run in enumerate(runs):
            run.state, run.seen = [tensor[i] for tensor in after[: run.schedule.size]], (run.step, inputs[i], guided[i])
            run.step += 1

    def _output(self, passes: Sequence[ForwardPass], division: Division, inputs: Tensor, timesteps: Tensor) -> Tensor:
        """Return the denoiser's output for the rows of all passes, computed side by side or one after the other."""
        self.adapter_slots.convolve(strided_apart=division.strided_apart)
        if division.fixed:
            outputs: list[Tensor] = []
            for each in passes:
                self.adapter_slots.bind(each.slots, each.scales)
                outputs.append(self._forward(0, each, inputs, timesteps).clone())  # the next may overwrite it
            return torch.cat(outputs)
        for lane, each in enumerate(passes):
            self.adapter_slots.bind(each.slots, each.scales, lane=lane)
        forward = [partial(self._forward, lane, each, inputs, timesteps) for lane, each in enumerate(passes)]
        return self.lanes.run(forward, single=division.single)

    def _forward(self, lane: int, rows: ForwardPass, inputs: Tensor, timesteps: Tensor) -> Tensor:
        chosen = rows.run_of_row
        denoise = partial(self.family.denoise, lane=lane) if self.graphs is None else self.graphs.denoise
        return denoise(inputs[chosen], timesteps[chosen], rows.conditioning)

    def _forward_batches(self, runs: Sequence[Run]) -> Iterator[ForwardBatch]:
        """Return the runs in one batch, or in several where this machine's bits depend on the rest of a batch."""
        last = self._last_batch
        if last is not None and last.runs == list(runs) and last.rows == [run.rows for run in runs]:
            yield last
            return
        alone = [run for run in runs if not self._may_mix(run)]
        for together in (*([run] for run in alone), *self._split_by_rank([run for run in runs if run not in alone])):
            self._last_batch = self._assemble(together)
            yield self._last_batch

    def _may_mix(self, run: Run) -> bool:
        factored = self.adapter_slots.factored(run.slot)
        return self.invariance is None or self.invariance.factors_agree(run.batch_key, run.conditioning, factored)

    def _split_by_rank(self, runs: Sequence[Run]) -> list[list[Run]]:
        ranks = {run.slot: self.adapter_slots.rank_of((run.slot,)) for run in runs}
        mixed = len(set(ranks.values()) - {0}) > 1
        if not mixed or self.invariance is None or self.invariance.ranks_agree(runs[0].batch_key, runs[0].conditioning):
            return [list(runs)] if runs else []
        in_order = sorted(runs, key=lambda run: ranks[run.slot])
        return [list(group) for _, group in groupby(in_order, key=lambda run: ranks[run.slot])]

    def _assemble(self, runs: list[Run]) -> ForwardBatch:
        each_rows = [run.rows for run in runs]
        owners = [i for i, rows in enumerate(each_rows) for _ in range(rows)]
        starts = [owners.index(i) for i in range(len(runs))]
        ends = list(accumulate(each_rows))
        assert len(owners) <= self.max_rows, f"a batch of {len(owners)} rows, at most {self.max_rows}"
        counts = self._division(runs[0]).passes(len(owners))
        padding = sum(counts) - len(owners)
        indices = [*owners, *[0] * padding, *starts, *(end - 1 for end in ends)]
        guidances = np.array([run.request.guidance for run in runs], np.float32).view(np.int32)
        run_of_row, sides, guidance = upload(
            np.concatenate([np.array(indices, np.int32), guidances]), self.family.device
        ).split([sum(counts), 2 * len(runs), len(runs)])
        conditioning = _join([run.conditioning.last(rows) for run, rows in zip(runs, each_rows, strict=True)], padding)
        slots = [runs[i].slot for i in owners] + [NO_SLOT] * padding
        scales = [runs[i].request.scale for i in owners] + [0.0] * padding
        passes = [
            ForwardPass(run_of_row[rows], _rows(conditioning, rows), slots[rows], scales[rows])
            for rows in map(slice, accumulate(counts[:-1], initial=0), accumulate(counts))
        ]
        return ForwardBatch(
            runs=runs,
            rows=each_rows,
            passes=passes,
            sides=sides,
            guidance=_per_run(guidance.view(torch.float32), runs[0].latents.dim()),
        )

    def _division(self, like: Run) -> Division:
        if self.invariance is not None:
            return self.invariance.division(like.batch_key, like.conditioning)
        return Division(1, self.lanes.count)


def begin(run: Run) -> None:
    """Give a run its first latents: noise, or its image with noise, drawn in the order of diffusers' pipelines."""
    image = run.conditioning.image
    if image is None:
        run.state[0] = draw_noise(run) * run.schedule.noise_scale
        return
    clean = image.mean if image.deviation is None else image.mean + image.deviation * draw_noise(run)
    noise = draw_noise(run)
    run.state[0] = run.schedule.noised(clean, noise, 0)
    if image.drawn is not None:
        run.kept = KeptImage(clean, noise, image.drawn)
        if image.deviation is not None:
            draw_noise(run)  # the pipelines encode what is kept too, and never use it
        if run.request.strength == 1:
            run.state[0] = noise * run.schedule.noise_scale


def _keep(runs: Sequence[Run], latents: Tensor) -> None:
    """Put back what masks keep, with the noise that each run's own latents have now."""
    for run, own in zip(runs, latents, strict=True):
        if run.kept is not None:
            image, noise, drawn = run.kept
            own.copy_((1 - drawn) * run.schedule.noised(image, noise, run.step + 1) + drawn * own)


def draw_noise(run: Run) -> Tensor:
    """Draw unit noise of the run's latent shape from its own generator, as diffusers' pipelines do."""
    noise = torch.randn((1, *run.latents.shape), generator=run.generator)
    return noise[0].to(run.latents.device)


def _noise(runs: Sequence[Run]) -> Tensor | None:
    """Draw each run's own noise, only in the steps whose sampler adds any."""
    if not any(run.schedule.noisy[run.step] for run in runs):
        return None
    return torch.stack(
        [draw_noise(run) if run.schedule.noisy[run.step] else torch.zeros_like(run.latents) for run in runs]
    )


def _join(conditionings: Sequence[Conditioning], padding: int) -> Conditioning:
    added = {
        name: _pad(torch.cat([one.added[name] for one in conditionings]), padding) for name in conditionings[0].added
    }
    return Conditioning(_pad(torch.cat([one.context for one in conditionings]), padding), added)


def _rows(conditioning: Conditioning, rows: slice) -> Conditioning:
    """Return some rows, or all; some are copied, so that they lie in memory as they would alone."""
    if rows == slice(0, conditioning.rows):
        return conditioning
    added = {name: tensor[rows].clone() for name, tensor in conditioning.added.items()}
    return Conditioning(conditioning.context[rows].clone(), added)


def _per_run(numbers: Tensor, dimensions: int) -> Tensor:
    """View [runs] as [runs, 1, …], a factor of latents that have `dimensions` dimensions after the runs."""
    return numbers.view(-1, *(1,) * dimensions)


def _remembered(run: Run, place: int) -> Tensor:
    """Return one tensor of a run's state, zeros in place of what only other samplers remember."""
    return run.state[place] if place < len(run.state) else torch.zeros_like(run.latents)


def _pad(rows: Tensor, padding: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(padding, *rows.shape[1:])]) if padding else rows


TORCH_SEEDS = 2**32
"""torch's CPU generator keeps the low 32 bits of a seed."""
_WORDS_AT = 24
"""Byte offset of the Mersenne Twister's 624 words in torch's generator state, after the seed and three counters."""


def seeded_generator(seed: int) -> torch.Generator:
    """Return a CPU generator for an unsigned 64-bit seed; every seed has its own stream.

    Below 2^32 it is torch's own. From 2^32 up the generator's whole state is filled from both halves of the seed by the
    Mersenne Twister's `init_by_array` (Matsumoto & Nishimura 1998), low half first, as numpy's `RandomState` does.
    """
    generator = torch.Generator().manual_seed(seed % TORCH_SEEDS)
    if seed < TORCH_SEEDS:
        return generator
    words = np.random.RandomState([seed % TORCH_SEEDS, seed // TORCH_SEEDS]).get_state(legacy=False)["state"]["key"]
    state = generator.get_state()
    state[:8] = _bytes_of(np.array([seed], np.uint64))
    state[_WORDS_AT : _WORDS_AT + 8 * len(words)] = _bytes_of(words.astype(np.uint64))
    generator.set_state(state)
    return generator


def _bytes_of(numbers: np.ndarray) -> torch.Tensor:
    """Return the numbers as this machine keeps them in memory."""
    return torch.from_numpy(numbers.view(np.uint8).copy())
