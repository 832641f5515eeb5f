"""Calls a store again until it answers."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from serve_app.domain.errors import StoreUnavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between tries of a store that does not answer."""

Answer = TypeVar("Answer")


async def retry_until_available(ask: Callable[[], Awaitable[Answer]], *, within: timedelta | None = None) -> Answer:
    """Call a store until it answers, or raise its `StoreUnavailable` once `within` has passed.

    Every script may run twice and every object has its attempt's name, so a repeated call does no harm.
    """
    loop = asyncio.get_running_loop()
    deadline = None if within is None else loop.time() + within.total_seconds()
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            if deadline is not None and loop.time() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
