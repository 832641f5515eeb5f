"""Durations and times as Redis counts them, in whole milliseconds, and as people read and write them.

`Position` is a row's place in a listing by time.
"""

import re
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import NamedTuple, Self

SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

_UNITS = {"s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY}
_CURSOR = re.compile(r"(-?[0-9]+)-(.+)")
_DURATION = re.compile(rf"([0-9]{{1,5}})([{''.join(_UNITS)}])")


def milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def epoch_ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def from_epoch_ms(ms: str | int) -> datetime:
    """Return an aware time in UTC."""
    return datetime.fromtimestamp(int(ms) / 1000, UTC)


class Position(NamedTuple):
    """A row's place in a listing by time, newest first; the newest is the greatest."""

    ms: int
    id: str

    @property
    def cursor(self) -> str:
        return f"{self.ms}-{self.id}"

    @classmethod
    def read(cls, cursor: str, pattern: str) -> Self | None:
        """Return the place that a cursor names; None for a text that has not the form of `pattern`."""
        parts = _CURSOR.fullmatch(cursor) if re.fullmatch(pattern, cursor) else None
        return cls(int(parts[1]), parts[2]) if parts else None


def parse_duration(text: str) -> timedelta:
    """Read a number and a unit: `30d`, `12h`, `45m`, `90s`. Raises `ValueError`."""
    given = _DURATION.fullmatch(text.strip().lower())
    if given is None:
        raise ValueError(f"must be a number and a unit, like 30d, 12h, 45m or 90s, not {text!r}")
    return int(given[1]) * _UNITS[given[2]]


def duration_text(duration: timedelta) -> str:
    """Write a duration exactly, in its largest whole unit: `30 days`, `24 hours`, `1 minute`."""
    for unit, length, least in (("day", DAY, 2), ("hour", HOUR, 1), ("minute", MINUTE, 1), ("second", SECOND, 1)):
        count, rest = divmod(duration, length)
        if count >= least and not rest:
            return _counted(count, unit)
    return f"{duration.total_seconds():g} seconds"


def period_text(duration: timedelta) -> str:
    """Write a duration after the word "per": `hour`, `minute`, `30 days`."""
    return duration_text(duration).removeprefix("1 ")


def wait_text(duration: timedelta) -> str:
    """Write how long to wait in a sentence, rounded up: `90 seconds`, `2 minutes`, `3 hours`."""
    seconds = max(1, ceil(duration.total_seconds()))
    for length, unit in ((3600, "hour"), (60, "minute")):
        if seconds > 1.5 * length:
            return _counted(ceil(seconds / length), unit)
    return _counted(seconds, "second")


def rounded_duration(duration: timedelta) -> str:
    """Write a duration in its largest unit that occurs twice: `45 s`, `12 min`, `3 h`, `8 d`."""
    for length, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if duration >= 2 * length:
            return f"{duration / length:.0f} {unit}"
    return f"{duration.total_seconds():.0f} s"


def measured_duration(duration: timedelta) -> str:
    """Write how long something took, in two units: `1.5 s`, `2 min 5 s`, `3 h 4 min`."""
    if duration < MINUTE:
        return f"{max(0.0, duration.total_seconds()):.1f} s"
    minutes, seconds = divmod(round(duration.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


MILLI = 1000
"""Work is stored in whole thousandths of a unit, so that running totals never drift."""
