"""What each process of the service stands on: its settings, Redis, measures, traces and background work.

A process can watch its event loop: while that stands nobody is answered, and nothing that runs on it can say so.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from serve_app.domain import metrics
from serve_app.domain.errors import AtelierError
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.measures import SEND_EVERY_S, Measures, is_cancelled
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

    async def run_in(self, place: AsyncExitStack, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end; until then it keeps what its caller's `place` holds."""
        held = place.pop_all()

        async def run() -> T:
            async with held:
                return await work

        return await self.run_to_end(run())

    async def wait(self) -> None:
        """Wait for all work, through its failures."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AtelierError):  # an AtelierError goes to the caller
            _log.warning("background work ended with %s", type(error).__name__)


async def repeat(what: str, work: Callable[[], Awaitable[object]], every_s: float, tell: Callable[..., None]) -> None:
    """Do work again and again until canceled; a round that fails is told of, and is not the last."""
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - what repeats outlives any failure of a round
            tell("%s failed, trying again in %g s: %s", what, every_s, error)
        if is_cancelled():  # the Redis client may swallow a cancel
            return
        await asyncio.sleep(every_s)


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
        sending = asyncio.create_task(repeat("sending measurements", measures.send, SEND_EVERY_S, _log.debug))
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


STALL_S = 1.0
"""A loop that stands for this long is reported. Serve gives a replica 7 s to answer a health check."""
BEAT_S = 0.25
_TOLD_AT = {round(seconds / BEAT_S) + 2 for seconds in (STALL_S, 10, 100, 1000)}
"""After these numbers of missed beats the log says where the loop stands."""


def watch_loop(measures: Measures) -> Callable[[], None]:
    """Watch the running event loop until what is returned is called.

    While it stands, the log says for how long and by which call; once it goes on, log and `measures` say how long it
    stood. Where the whole process stood, stopped or without a processor, there is no call to name.
    """
    watch = _Watch(measures)
    threading.Thread(target=watch.look_forever, name="event loop watch", daemon=True).start()
    return watch.is_over.set


class _Watch:
    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._missed, self._beat_at = 0, time.monotonic()
        self.is_over = threading.Event()
        self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        """Note by how much this beat is late; it runs on the loop."""
        if self.is_over.is_set():
            return
        now = time.monotonic()
        stood = now - self._beat_at - BEAT_S
        self._missed, self._beat_at = 0, now
        if stood >= STALL_S:
            _log.warning("the event loop stood still for %.1f s", stood)
            self._measures.count(metrics.LOOP_STALLED, by=stood)
        self._loop.call_later(BEAT_S, self._beat)

    def look_forever(self) -> None:
        """Runs in a thread, and counts its own rounds instead of time: a process that was stopped has made none."""
        while not self.is_over.wait(BEAT_S):
            self._missed += 1
            if self._missed in _TOLD_AT:
                frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]
                stood, stack = time.monotonic() - self._beat_at - BEAT_S, "".join(traceback.format_stack(frame))
                _log.warning("the event loop has stood still for %.1f s:\n%s", stood, stack)
