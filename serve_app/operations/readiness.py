"""Tells from Redis, the stores and what the deployment promises whether the service is ready for jobs."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.domain.errors import Overloaded, StoreUnavailable
from serve_app.domain.jobs import DEFAULT_GROUP, pool_of
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.images import ImageStore
from serve_app.jobs.workers import WorkerStatus
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.settings import Settings
from serve_app.store.measures import Measures, MemoryReserve, may_hold
from serve_app.store.storage import Space

READY_TIMEOUT_S = 5.0
LONGEST_START_S = 600
"""If work has waited for this many seconds without a sign of any worker, none is starting."""
OK, DOWN, BUSY = "ok", "down", "busy"
"""A service that is busy is ready: taken out of the balance, it would leave its load to the others."""
IDLE, STARTING, UNWRITABLE = "scaled to zero", "starting", "cannot be written"
UNSERVED = "no application serves this group"
GENERATOR = "generator"
"""What readiness calls the generators of the group `default`; those of another group are `generator.<group>`."""
DISK, MEMORY, STORAGE = "disk below its reserve", "Redis at its memory limit", "storage cannot be written"

KeepsWorker = Callable[[str], Awaitable[bool | None]]
"""Tells whether the deployment keeps a worker of this pool even while there is no work; None where no application has
workers for it."""


async def never(_pool: str) -> bool:
    return False


class Readiness(NamedTuple):
    """What the service can do now."""

    states: Mapping[str, str]
    """Part → its state; only an operator is shown it."""
    reason: str
    """What keeps new jobs out, or from being completed, in words; empty while they are accepted."""

    @property
    def answers_polls(self) -> bool:
        return self.states["redis"] != DOWN

    @property
    def is_ready(self) -> bool:
        """Whether polls are answered and accepted jobs, of one group of base models at least, will be worked on."""
        generators = (state for part, state in self.states.items() if part.partition(".")[0] == GENERATOR)
        return self.answers_polls and any(state in (IDLE, BUSY) or state.startswith(OK) for state in generators)


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """Tells what the service can do now, from what Redis knows and the deployment promises."""

    settings: Settings
    measures: Measures
    stats: QueueStats
    images: ImageStore
    space: Space
    workers: WorkerStatus
    catalog: AppliedCatalog
    keeps_worker: KeepsWorker

    async def readiness(self) -> Readiness:
        """Ask every part within a limit of time, and the generators of each group that a base model names."""
        turn_s = READY_TIMEOUT_S + self.settings.longest_redis_wait.total_seconds()
        redis, reasons = await asyncio.gather(
            _answers(self.stats.dead(), within_s=turn_s), what_keeps_jobs_out(self.images, self.space)
        )
        states = {"redis": redis, "storage": UNWRITABLE if STORAGE in reasons else OK}
        if redis == DOWN:
            return Readiness(states, "Redis does not answer")
        groups = await self._groups()
        generators = await asyncio.gather(*(self._generator(pool_of(group), ids) for group, ids in groups.items()))
        names = (GENERATOR if group == DEFAULT_GROUP else f"{GENERATOR}.{group}" for group in groups)
        return Readiness({**states, **dict(zip(names, generators, strict=True))}, ", ".join(reasons))

    async def base_warning(self, base_model: str) -> str:
        """Return a warning that jobs of the base model wait until somebody acts; empty while none has to.

        Nothing serves its group then, or the workers of the group have not loaded it. One that has scaled to zero may.
        Raises `StoreUnavailable`.
        """
        pools = {model.id: model.pool for model in await self.catalog.applied_base_models()}
        pool = pools.get(base_model, pool_of(DEFAULT_GROUP))
        workers = await self.measures.shown(pool)
        if may_hold(workers, base_model) or (not workers and await self.keeps_worker(pool) is not None):
            return ""
        if not workers:
            return f"Nothing serves {base_model}: jobs with this LoRA wait until generators for it are started."
        return (
            f"No running worker has loaded {base_model}: jobs with this LoRA wait until the generators are restarted."
        )

    async def _groups(self) -> dict[str, list[str]]:
        """Return the applied base models of each group, or the one group, without any, of a service that has none."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                models = await self.catalog.applied_base_models()
        except (Overloaded, StoreUnavailable, TimeoutError):
            models = []
        groups = sorted(
            {model.group for model in models} or {DEFAULT_GROUP}, key=lambda each: (each != DEFAULT_GROUP, each)
        )
        return {group: [model.id for model in models if model.group == group] for group in groups}

    async def _generator(self, pool: str, base_models: Sequence[str]) -> str:
        """Tell from Redis whether the jobs of a pool will be worked on.

        A worker seen in the last minute means yes, except for base models that none has loaded. Otherwise a failed
        start since the last successful one means no. Without such a failure the deployment's promise decides: where it
        keeps a worker, one is missing and should be starting; where it may have none, the pool is idle, unless work
        has waited for so long that none can be starting.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                if alive := await self.measures.shown(pool):
                    missing = ", ".join(each for each in base_models if not may_hold(alive, each))
                    return f"{OK}, but no generator has loaded {missing}: restart its generators" if missing else OK
                failure, starting = await self.workers.failure(pool), await self.workers.starting(pool)
                waiting = (await self.stats.backlog(pool)).oldest_age_s
                is_kept = await self.keeps_worker(pool)
        except Overloaded:
            return BUSY
        except (StoreUnavailable, TimeoutError):
            return DOWN
        if is_kept is None:
            return UNSERVED
        if failure is not None:
            return f"cannot start: {failure}" + ("" if starting is None else f"; another try: {starting}")
        if not is_kept and waiting <= LONGEST_START_S:
            return IDLE
        return "none has started" if starting is None else f"{STARTING}: {starting}"


async def what_keeps_jobs_out(images: ImageStore, space: Space) -> list[str]:
    """Name what keeps new jobs from being accepted, or completed, by a service whose Redis answers."""
    disk, is_full, is_writable = await asyncio.gather(
        _answers(space.disk.check(), within_s=READY_TIMEOUT_S), _is_redis_full(space.memory), images.is_writable()
    )
    found = {DISK: disk == DOWN, MEMORY: is_full, STORAGE: not is_writable}
    return [reason for reason, holds in found.items() if holds]


async def _is_redis_full(reserve: MemoryReserve) -> bool:
    try:
        memory = await reserve.read()
    except (Overloaded, StoreUnavailable):
        return False
    return memory is not None and memory.is_short


async def _answers(probe: Coroutine[Any, Any, object], *, within_s: float) -> str:
    try:
        async with asyncio.timeout(within_s):
            await probe
    except Overloaded:
        return BUSY
    except (StoreUnavailable, TimeoutError):
        return DOWN
    return OK
