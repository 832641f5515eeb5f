"""Arrival rate: how much work is accepted a second, so that replicas start before work waits."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

MINUTES, MINUTE_S = 10, 60.0
"""Long enough that chance counts for little (6 % at 1.4 jobs a second), short enough to follow a day's wave."""
BURST = 1.5
"""A minute counts as at most this many usual ones: what a burst brings waits, and asks for replicas as backlog."""
AHEAD = 2.0
"""Minutes from the middle of the last whole one for which a trend is continued: one until now, and one for a replica's start."""
SURE = 2.0
"""Standard errors by which a trend is cut before it is continued: among few jobs it is mostly chance."""


class ArrivalRate:
    """Remembers how much had been accepted at the end of each of the last minutes."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=MINUTES + 1)

    def add(self, at: float, accepted: float) -> None:
        """Note the work units accepted since ever, as of `at` (seconds of any clock that does not go back)."""
        if self._marks and accepted < self._marks[-1][1]:
            self._marks.clear()  # another Redis, or an older one restored
        if not self._marks or at - self._marks[-1][0] >= MINUTE_S:
            self._marks.append((at, accepted))

    @property
    def units_per_second(self) -> float | None:
        """Return the mean of the last minutes, continued as they rose or fell.

        Bursts are cut. None within the first minute.
        """
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
    centre, mean = (count - 1) / 2, fmean(rates)
    spread = sum((minute - centre) ** 2 for minute in range(count))
    slope = sum((minute - centre) * (rate - mean) for minute, rate in enumerate(rates)) / spread
    residual = sum((rate - mean - slope * (minute - centre)) ** 2 for minute, rate in enumerate(rates))
    chance = SURE * math.sqrt(residual / (count - 2) / spread)
    return math.copysign(max(0.0, abs(slope) - chance), slope)
