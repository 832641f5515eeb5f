"""Reports whether polls can be answered, new jobs are accepted, and a generator lives or will start."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

from serve_app.domain.errors import Overloaded, StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.service.resources import Resources

READY_TIMEOUT_S = 5.0
LONGEST_START_S = 600
"""Work that has waited for so long without a sign of any worker: none is starting."""
OK, DOWN, BUSY = "ok", "down", "busy"
"""A service that is busy is ready: taken out of the balance, it would leave its load to the others."""
IDLE, UNWRITABLE = "scaled to zero", "cannot be written"
DISK, MEMORY, STORAGE = "disk below its reserve", "Redis at its memory limit", "storage cannot be written"


class Readiness(NamedTuple):
    """What the service can do now."""

    states: Mapping[str, str]
    """The state of each part; the details are the operator's."""
    reason: str
    """What keeps new jobs out, or from being completed; empty while they are accepted."""

    @property
    def answers_polls(self) -> bool:
        return self.states["redis"] != DOWN

    @property
    def is_ready(self) -> bool:
        """Whether polls are answered and accepted jobs will be worked on."""
        return self.answers_polls and self.states["generator"] in (OK, IDLE, BUSY)


async def readiness(resources: Resources) -> Readiness:
    """Ask every part, each within a limit of time."""
    turn_s = READY_TIMEOUT_S + resources.settings.longest_redis_wait.total_seconds()
    redis, reasons = await asyncio.gather(
        _answers(resources.queue_stats.backlog(JobKind.GENERATION), within_s=turn_s), what_keeps_jobs_out(resources)
    )
    states = {"redis": redis, "storage": UNWRITABLE if STORAGE in reasons else OK}
    if redis == DOWN:
        return Readiness(states, "Redis does not answer")
    return Readiness({**states, "generator": await _generator(resources)}, ", ".join(reasons))


async def what_keeps_jobs_out(resources: Resources) -> list[str]:
    """Name what keeps new jobs from being accepted, or completed, by a service whose Redis answers."""
    disk, is_full, is_writable = await asyncio.gather(
        _answers(resources.disk.check(), within_s=READY_TIMEOUT_S),
        _is_redis_full(resources),
        resources.images.is_writable(),
    )
    found = {DISK: disk == DOWN, MEMORY: is_full, STORAGE: not is_writable}
    return [reason for reason, holds in found.items() if holds]


async def _is_redis_full(resources: Resources) -> bool:
    try:
        memory = await resources.memory.read()
    except (Overloaded, StoreUnavailable):
        return False
    return memory is not None and memory.is_short


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
