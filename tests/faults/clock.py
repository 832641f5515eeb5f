"""A wall clock that is wrong, for this process alone: Redis keeps the true time."""

from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import time_machine

from serve_app.store.script import Rewrite


def clock_off_by(error: timedelta) -> AbstractContextManager[Any]:
    """Within it, this process's wall clock runs ahead by `error`. Its monotonic clock is as ever."""
    return cast(AbstractContextManager[Any], time_machine.travel(datetime.now(UTC) + error, tick=True))


def by_the_callers_clock(error: timedelta) -> Rewrite:
    """Scripts that take the time from a caller whose clock is off by `error`, which ours must never do."""
    ahead_ms = round(error.total_seconds() * 1000)
    return lambda _, text: text.replace("local now = time[1] * 1000", f"local now = {ahead_ms} + time[1] * 1000")
