"""Durations and times in whole milliseconds, as Redis and its scripts count."""

from datetime import UTC, datetime, timedelta


def milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def epoch_ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def from_epoch_ms(ms: str | int) -> datetime:
    """Return an aware time in UTC."""
    return datetime.fromtimestamp(int(ms) / 1000, UTC)
