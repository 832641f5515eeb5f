"""Reports whether the service is ready: its stores answer, and a generator lives or will start."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from serve_app.domain.errors import Overloaded, StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.service.resources import Resources

READY_TIMEOUT_S = 5.0
PROBE = "images/0/1970/01/01/probe/a0-0.png"
"""A well-formed name that no job has: asking for it proves that the storage answers."""
LONGEST_START_S = 600
"""Work that has waited for so long without a sign of any worker: none is starting."""
OK, DOWN, BUSY = "ok", "down", "busy"
"""A service that is busy is ready: taken out of the balance, it would leave its load to the others."""
IDLE = "scaled to zero"


async def readiness(resources: Resources) -> tuple[bool, dict[str, str]]:
    """Return whether the service is ready, and the state of each part; the details are the operator's."""
    turn_s = READY_TIMEOUT_S + resources.settings.longest_redis_wait.total_seconds()
    states = {
        "redis": await _answers(resources.queue_stats.backlog(JobKind.GENERATION), within_s=turn_s),
        "storage": await _answers(resources.images.exists(resources.images.uri(PROBE)), within_s=READY_TIMEOUT_S),
    }
    if states["redis"] != DOWN:
        states["generator"] = await _generator(resources)
    return all(state in (OK, IDLE, BUSY) for state in states.values()), states


async def _generator(resources: Resources) -> str:
    """Tell from Redis whether jobs will be worked on.

    A worker seen in the last minute says yes. Else a worker that failed to start, after the last that
    could, says no; and where none has, it depends on what the deployment promises: at least one replica (then one is missing),
    or none until there is work (then work that has waited long says that none comes).
    """
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            if await resources.workers.is_any_alive(JobKind.GENERATION):
                return OK
            failure = await resources.workers.failure(JobKind.GENERATION)
            waiting = (await resources.queue_stats.backlog(JobKind.GENERATION)).oldest_age_s
            is_kept = await resources.keeps_worker(JobKind.GENERATION)
    except Overloaded:
        return BUSY
    except (StoreUnavailable, TimeoutError):
        return DOWN
    if failure is not None:
        return f"cannot start: {failure}"
    return "none has started" if is_kept or waiting > LONGEST_START_S else IDLE


async def _answers(probe: Coroutine[Any, Any, object], *, within_s: float) -> str:
    try:
        async with asyncio.timeout(within_s):
            await probe
    except Overloaded:
        return BUSY
    except (StoreUnavailable, TimeoutError):
        return DOWN
    return OK
