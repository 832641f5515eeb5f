"""Defines the intervals and limits of a worker."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTiming:
    """Intervals and limits of a worker."""

    poll: timedelta = timedelta(seconds=0.5)
    """An idle worker asks for work this often when no hint comes."""
    heartbeat: timedelta = timedelta(seconds=1)
    """Progress is written, and a cancel noticed, this often; a third of the lease at the latest."""
    step_limit: timedelta = timedelta(minutes=3)
    """A step that takes longer is hung: its leases are left to expire and the replica reports itself unhealthy."""
    job_limit: timedelta = timedelta(minutes=30)
    """An attempt that takes longer fails with `timeout`."""
    prefetch: timedelta | None = None
    """An executor that prefetches adapters looks for another this often; None never."""
    open_jobs: int = 64
    """Jobs begun and not committed: what bounds the images held in memory while storage is slow."""
