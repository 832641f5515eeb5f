"""Estimates when a job ends, from measured speeds and the waiting work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.jobs import JobKind, JobState

DEFAULT_SECONDS_PER_UNIT: Mapping[JobKind, float] = {JobKind.GENERATION: 0.5, JobKind.UPSCALE: 0.5}
"""Seconds per work unit (megapixel-step; output megapixel) until the first job has been measured: a small CPU's order."""
MILLI = 1000
"""Work is stored in whole thousandths of a unit, so that running totals never drift."""
SOONEST = timedelta(seconds=1)
"""An estimate is never in the past, nor promises less than this."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """What an estimate needs, as `queue.lua` reads it.

    Work is in thousandths of a unit. `place` is the job's place in its account's queue (-1: in none), `accounts` are
    those with waiting jobs, `start_seconds` is how long the last worker took to start.
    """

    seconds_per_unit: float | None
    ready: int
    ready_work: int
    work: int
    workers: int
    accounts: int
    place: int
    now: datetime
    start_seconds: float | None = None


def read_position(answer: Sequence[Any]) -> QueuePosition:
    seconds_per_unit, ready, ready_work, work, workers, accounts, place, now, start_seconds = answer
    return QueuePosition(
        seconds_per_unit=float(seconds_per_unit) if seconds_per_unit else None,
        ready=int(ready),
        ready_work=int(ready_work),
        work=int(work),
        workers=workers,
        accounts=accounts,
        place=place,
        now=from_epoch_ms(now),
        start_seconds=float(start_seconds) if start_seconds else None,
    )


def estimate_finish(kind: JobKind, state: JobState, fields: Mapping[str, str], position: QueuePosition) -> datetime:
    """Estimate when a job finishes: a worker's start if none is there, the work ahead, and its own rest."""
    own = int(fields["work"])
    left = own * (1 - int(fields.get("progress", 0)) / 100)
    ahead = _work_ahead(own, position) / max(1, position.workers) if state is JobState.QUEUED else 0.0
    seconds_per_unit = (
        DEFAULT_SECONDS_PER_UNIT[kind] if position.seconds_per_unit is None else position.seconds_per_unit
    )
    starting = position.start_seconds or 0.0 if waits_for_worker(state, position) else 0.0
    return position.now + max(SOONEST, timedelta(seconds=starting + (left + ahead) / MILLI * seconds_per_unit))


def waits_for_worker(state: JobState, position: QueuePosition) -> bool:
    """Whether no worker is there that could take the job: the deployment has scaled to none, or starts."""
    return state is JobState.QUEUED and position.workers == 0


def _work_ahead(own: int, position: QueuePosition) -> float:
    """Return half of the running work and what the fair queue serves before this job.

    That is as many jobs of each waiting account as are before this one in its own.
    """
    running = max(0, position.work - position.ready_work) / 2
    if position.place < 0 or position.ready == 0:
        return running  # backing off: it comes back at its old place, near the front
    before = position.place * max(1, position.accounts) * position.ready_work / position.ready
    return running + min(before, max(0, position.ready_work - own))
