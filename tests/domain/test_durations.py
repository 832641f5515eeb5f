"""Durations and times are counted, written and read alike everywhere."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from serve_app.domain.durations import (
    DAY,
    HOUR,
    MINUTE,
    SECOND,
    duration_text,
    epoch_ms,
    from_epoch_ms,
    measured_duration,
    milliseconds,
    parse_duration,
    period_text,
    rounded_duration,
    wait_text,
)


def test_times_are_counted_in_whole_milliseconds_of_utc() -> None:
    moment = datetime(2026, 11, 24, 12, 30, 0, 123_000, tzinfo=UTC)
    assert from_epoch_ms(epoch_ms(moment)) == moment
    assert from_epoch_ms(str(epoch_ms(moment))).tzinfo is UTC
    assert milliseconds(timedelta(seconds=1.5)) == 1500


@pytest.mark.parametrize(
    ("text", "duration"), [("30d", 30 * DAY), (" 12H ", 12 * HOUR), ("45m", 45 * MINUTE), ("0s", timedelta())]
)
def test_a_number_and_a_unit_are_a_duration(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5h", "1w", "100000d", "1d 2h", "١d"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number and a unit, like 30d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("duration", "text", "period"),
    [
        (30 * DAY, "30 days", "30 days"),
        (DAY, "24 hours", "24 hours"),
        (HOUR, "1 hour", "hour"),
        (90 * MINUTE, "90 minutes", "90 minutes"),
        (MINUTE, "1 minute", "minute"),
        (11 * SECOND, "11 seconds", "11 seconds"),
        (SECOND, "1 second", "second"),
        (2.5 * SECOND, "2.5 seconds", "2.5 seconds"),
        (timedelta(), "0 seconds", "0 seconds"),
    ],
)
def test_a_duration_is_written_in_its_largest_whole_unit(duration: timedelta, text: str, period: str) -> None:
    assert duration_text(duration) == text
    assert period_text(duration) == period


@pytest.mark.parametrize(
    ("write", "duration", "text"),
    [
        (wait_text, -SECOND, "1 second"),
        (wait_text, 1.1 * SECOND, "2 seconds"),
        (wait_text, 90 * SECOND, "90 seconds"),
        (wait_text, 90.1 * SECOND, "2 minutes"),
        (wait_text, 61 * MINUTE, "61 minutes"),
        (wait_text, 91 * MINUTE, "2 hours"),
        (wait_text, 24.1 * HOUR, "25 hours"),
        (rounded_duration, timedelta(), "0 s"),
        (rounded_duration, 119 * SECOND, "119 s"),
        (rounded_duration, 12.4 * MINUTE, "12 min"),
        (rounded_duration, 119 * MINUTE, "119 min"),
        (rounded_duration, 3 * HOUR, "3 h"),
        (rounded_duration, 8 * DAY, "8 d"),
        (measured_duration, -SECOND, "0.0 s"),
        (measured_duration, 1.54 * SECOND, "1.5 s"),
        (measured_duration, 125 * SECOND, "2 min 5 s"),
        (measured_duration, 3 * HOUR + 4 * MINUTE + 5 * SECOND, "3 h 4 min"),
    ],
)
def test_other_durations_have_one_unit_or_two(
    write: Callable[[timedelta], str], duration: timedelta, text: str
) -> None:
    assert write(duration) == text
