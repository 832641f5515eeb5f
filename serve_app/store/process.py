"""What each process of the service stands on: its settings, Redis, measures, traces and background work."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from serve_app.domain.errors import AtelierError
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.measures import Measures
from serve_app.store.redis_client import RedisClient, connect
from serve_app.tracing import Traces, open_traces

_log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="_HasBackground")


class Background:
    """Work that outlives its caller; closing the process waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def count(self) -> int:
        """Return how many tasks have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end, even when the caller is canceled: its client may disconnect."""
        return await asyncio.shield(self.spawn(work))

    async def wait(self) -> None:
        """Wait for all work, through its failures."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AtelierError):  # an AtelierError goes to the caller
            _log.warning("background work ended with %s", type(error).__name__)


class _HasBackground(Protocol):
    @property
    def background(self) -> Background: ...


def to_its_end(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Decorate a method of an object that has a `background`: it runs to its end, even when its caller is canceled."""

    @wraps(method)
    async def run(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.background.run_to_end(method(self, *args, **kwargs))

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of the service. The parts that it needs are composed over it, by whoever runs it."""

    settings: Settings
    redis_url: str
    """The address of the Redis in use, the embedded one included."""
    redis: RedisClient
    measures: Measures
    traces: Traces
    background: Background


@asynccontextmanager
async def open_process(settings: Settings) -> AsyncGenerator[Process]:
    """Connect to Redis, starting the embedded one if the settings name none, and send measures until the end.

    Raises `StoreUnavailable`, `TracesUnavailable`.
    """
    redis_url = settings.redis_url or (await asyncio.to_thread(ensure_redis, settings.data_dir)).url
    traces = open_traces(settings)
    redis = connect(redis_url, connections=settings.redis_connections, wait=settings.longest_redis_wait)
    try:
        measures, background = Measures(redis), Background()
        sending = asyncio.create_task(measures.send_forever())
        try:
            yield Process(
                settings=settings,
                redis_url=redis_url,
                redis=redis,
                measures=measures,
                traces=traces,
                background=background,
            )
        finally:
            await background.wait()
            sending.cancel()
            await measures.send_last()
            await asyncio.to_thread(traces.close)
    finally:
        await redis.aclose()
