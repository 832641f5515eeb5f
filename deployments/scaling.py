"""Scales replicas by demand and backlog: a thread reads them, and the policy answers from memory.

Demand is how much work is accepted a second, so that replicas start before work waits.
"""

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

from deployments.config import SPARE
from deployments.ray_internals import has_run
from serve_app.domain.jobs import Backlog, JobKind, kind_of_pool
from serve_app.jobs.backlog import read_backlog
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis

MINUTES, MINUTE_S = 10, 60.0
"""Demand is averaged over ten minutes: chance then counts for little (6 % at 1.4 jobs a second), and it still follows
a day's wave."""
BURST = 1.5
"""One minute's demand is capped at this multiple of the average minute; the rest of a burst counts as backlog."""
AHEAD = 2.0
"""Demand is extrapolated this many minutes beyond the middle of the last whole minute: one to reach now, one for a
replica to start."""
SURE = 2.0
"""A trend is cut by this many standard errors before it is continued: among few jobs it is mostly chance."""


class ArrivalRate:
    """Remembers how much work had been accepted at the end of each of the last minutes."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=MINUTES + 1)

    def add(self, at: float, accepted: float) -> None:
        """Note the work units accepted since ever, as of `at` (seconds of any clock that does not go back)."""
        if self._marks and accepted < self._marks[-1][1]:
            self._marks.clear()  # this is another Redis, or an older one restored
        if not self._marks or at - self._marks[-1][0] >= MINUTE_S:
            self._marks.append((at, accepted))

    @property
    def units_per_second(self) -> float | None:
        """The mean of the last minutes without bursts, continued as they rose or fell; None in the first minute."""
        rates = [(after - before) / (then - at) for (at, before), (then, after) in pairwise(self._marks)]
        if not rates:
            return None
        usual = median(rates)
        cut = [min(rate, BURST * usual) if usual else rate for rate in rates]
        return max(0.0, fmean(cut) + certain_trend(cut) * ((len(cut) - 1) / 2 + AHEAD))


def certain_trend(rates: Sequence[float]) -> float:
    """The slope of a line through the rates, by least squares, as far as chance does not explain it."""
    count = len(rates)
    if count < MINUTES:
        return 0.0
    slope, start = linear_regression(range(count), rates)
    residual = sum((rate - start - slope * minute) ** 2 for minute, rate in enumerate(rates))
    spread = count * (count * count - 1) / 12  # the sum of squared distances from the middle minute
    chance = SURE * math.sqrt(residual / (count - 2) / spread)
    return math.copysign(max(0.0, abs(slope) - chance), slope)


log = logging.getLogger(__name__)

READ_EVERY_S, STALE_AFTER_S = 0.5, 10.0
ROUNDING = 1e-9


class Reading(NamedTuple):
    backlog: Backlog
    units_per_second: float | None
    at: float
    least: int
    """How many replicas are wanted without any work."""


class BacklogPolicy:
    """A Serve autoscaling policy that never blocks and never raises.

    Serve's controller calls it ten times a second on its event loop. Without a recent reading it keeps the number of
    replicas. Without work it still asks for one generator until one of its pool has run in this Ray cluster, which
    shows that one can: `Housekeeper` waits for that.
    """

    def __init__(
        self,
        kind: str,
        target_s: float,
        *,
        spare: float = SPARE,
        stale_after_s: float = STALE_AFTER_S,
        read: Callable[[str], Backlog] | None = None,
        has_run: Callable[[str], bool] = has_run,
    ) -> None:
        self._target_s, self._spare = target_s, spare
        self._stale_after_s = stale_after_s
        self._latest: list[Reading] = []
        """Holds the latest reading; empty before the first."""
        stop = threading.Event()
        parts = (kind, read or _read, has_run, self._latest, stop)
        watch = threading.Thread(target=_watch, args=parts, name=f"{kind}-backlog", daemon=True)
        watch.start()
        weakref.finalize(self, stop.set)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reading = self._latest[-1] if self._latest else None
        if reading is None or time.monotonic() - reading.at > self._stale_after_s:
            return context.target_num_replicas, {}
        wanted = wanted_replicas(reading.backlog, reading.units_per_second, self._target_s, self._spare)
        return max(wanted, reading.least), {}


def wanted_replicas(backlog: Backlog, units_per_second: float | None, target_s: float, spare: float = SPARE) -> int:
    """Compute how many replicas do what arrives, and one more for each `target_s` of work that waits.

    `spare` is a share of these, rounded down: in a fleet of six or fewer, rounding the demand up leaves as much. Any
    work needs at least one; without work none is wanted once less than one is needed, and Serve's
    `downscale_to_zero_delay_s` says how long the last one stays. What arrives counts at the speed of replicas that are
    fully busy: at their present speed, spare replicas would justify themselves, since a forward pass for few images
    draws each more slowly. While no demand is known, right after a start of Serve's controller, there is one for each
    `target_s` seconds of all unfinished work.
    """
    has_work = backlog.ready + backlog.leased + backlog.delayed > 0
    if units_per_second is None:
        return max(int(has_work), math.ceil(backlog.seconds / target_s))
    needed = units_per_second * backlog.busy_seconds_per_unit + backlog.ready_seconds / target_s
    if needed < 1 and not has_work:
        return 0
    return max(int(has_work), math.ceil(needed), math.floor(needed * (1 + spare) + ROUNDING))


def _watch(
    pool: str,
    read: Callable[[str], Backlog],
    has_run: Callable[[str], bool],
    latest: list[Reading],
    stop: threading.Event,
) -> None:
    rate, is_shown = ArrivalRate(), kind_of_pool(pool) is not JobKind.GENERATION
    while not stop.is_set():
        try:
            backlog, now = read(pool), time.monotonic()
            rate.add(now, backlog.accepted)
            is_shown = is_shown or has_run(pool)
            latest[:] = [Reading(backlog, rate.units_per_second, now, least=0 if is_shown else 1)]
        except Exception as error:  # noqa: BLE001 - the thread outlives any outage: a stale reading keeps the replicas
            log.warning("the backlog cannot be read: %r", error)
        stop.wait(READ_EVERY_S)


def _read(pool: str) -> Backlog:
    settings = Settings()
    return read_backlog(settings.redis_url or ensure_redis(settings.data_dir).url, pool)
