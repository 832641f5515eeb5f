"""Collects what this process measures for `/metrics`, and adds it in Redis to all processes' sums.

`MemoryReserve` measures Redis itself: what makes it grow is refused while it is still below its `maxmemory`. A full
Redis refuses every write that needs memory; ending, canceling and deleting jobs, heartbeats, signing in and operators'
changes are such writes, and the reserve is kept for them.
"""

import asyncio
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from serve_app.domain.durations import milliseconds
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import WORKER_LIFE
from serve_app.domain.metrics import SLOW_SCRIPTS, Metric, bucket_of, field_of
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

SEND_EVERY_S = 5.0
"""How often measurements are sent: a third of the usual interval of Prometheus."""
SEQUENCE_LIFE = timedelta(hours=1)
"""How long Redis remembers the last call of a process, far longer than a call is repeated for."""
GAUGES_LIFE = timedelta(minutes=10)
_BASE_MODELS, _LORAS = "base_models", "loras"


class ShownWorker(NamedTuple):
    """What a live worker has last shown; empty for one that has shown nothing."""

    name: str
    silent_s: float
    gauges: Mapping[str, float]
    """The gauges by their `gauge_field`."""
    base_models: Sequence[str]
    loras: Sequence[str]


class Measures:
    """Counts and observations of one process, and the gauges of its worker.

    It is not thread-safe: only the event loop may use it.
    """

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._add = Script(redis, "store/add_measures")
        self._source = secrets.token_hex(8)
        self._sequence = 0
        self._pending: defaultdict[str, float] = defaultdict(float)
        self._unsent: Mapping[str, float] = {}
        self._sending = asyncio.Lock()

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        self._pending[field_of(metric, *labels)] += by

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        self._pending[field_of(metric, *labels, part=bucket_of(metric, value))] += 1
        self._pending[field_of(metric, *labels, part="sum")] += value

    async def send(self) -> None:
        """Add what has been measured since the last call to the sums in Redis.

        Raises `StoreUnavailable`: then the next call adds it too, once.
        """
        async with self._sending:
            if not self._unsent:
                while self._redis.slow_scripts:
                    name, seconds = self._redis.slow_scripts.popleft()
                    self.observe(SLOW_SCRIPTS, seconds, name)
                if not self._pending:
                    return
                self._unsent, self._pending = self._pending, defaultdict(float)
                self._sequence += 1
            amounts: list[str | int] = []
            for name, amount in self._unsent.items():
                amounts += [name, f"{amount:.9g}"]
            life_ms = milliseconds(SEQUENCE_LIFE)
            await self._add(source=self._source, sequence=self._sequence, life_ms=life_ms, amounts=amounts)
            self._unsent = {}

    async def send_last(self) -> None:
        """Send before the process ends; without Redis, the last measurements are lost."""
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(1):
                await self.send()

    async def show(
        self,
        pool: str,
        worker: str,
        gauges: Mapping[str, float],
        *,
        base_models: Sequence[str] = (),
        loras: Sequence[str] = (),
    ) -> None:
        """Store a worker's gauges, by `gauge_field`, and the weights it holds, until the next call.

        Raises `StoreUnavailable`.
        """
        shown = {**gauges, _BASE_MODELS: list(base_models), _LORAS: list(loras)}
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(redis_key("gauges", pool), worker, json.dumps(shown))
        pipeline.pexpire(redis_key("gauges", pool), GAUGES_LIFE)
        await pipeline.execute()

    async def measured(self) -> Mapping[str, float]:
        """Return every number of all processes, by its field."""
        row: dict[str, str] = await self._redis.hgetall(redis_key("measures"))
        return {name: float(value) for name, value in row.items()}

    async def shown(self, pool: str) -> list[ShownWorker]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.zrange(redis_key("workers", pool), 0, -1, withscores=True)
        pipeline.hgetall(redis_key("gauges", pool))
        (seconds, micros), workers, gauges = await pipeline.execute()
        now = seconds * 1000 + micros // 1000
        since = now - milliseconds(WORKER_LIFE)
        return [_shown(name, now - seen, gauges.get(name, "{}")) for name, seen in workers if seen >= since]


def may_hold(workers: Iterable[ShownWorker], base_model: str) -> bool:
    """Return whether one of the workers has loaded the base model, or has not said what it holds."""
    return any(not each.base_models or base_model in each.base_models for each in workers)


def gauge_field(metric: Metric, *labels: str) -> str:
    """Return the name of a worker's gauge: the metric's own, and the values of its labels but `pool`."""
    assert len(labels) == len(metric.labels) - 1, f"{metric.name} has the labels {metric.labels}"
    return "|".join((metric.name, *labels))


def _shown(name: str, silent_ms: float, text: str) -> ShownWorker:
    shown: dict[str, Any] = json.loads(text)
    base_models, loras = shown.pop(_BASE_MODELS, []), shown.pop(_LORAS, [])
    return ShownWorker(name, max(0.0, silent_ms / 1000), shown, base_models, loras)


def is_cancelled() -> bool:
    """Return whether a cancel was lost in the Redis client (CPython issue 86296)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


RESERVE_SHARE = 0.1
"""This share of `maxmemory` is kept. At the least limit that we set, 256 MiB, it is 26 MiB: more than what all ingress
replicas accept between two looks takes, and ten times what ending 10,000 jobs takes."""
CHECK_EVERY_S = 1.0
"""How often free memory and free disk are looked at, at the most."""


class RedisMemory(NamedTuple):
    """Memory of Redis in bytes; a limit of 0 is none."""

    used: int
    limit: int

    @property
    def is_short(self) -> bool:
        """Return whether only the reserve is left, so that new jobs are refused."""
        return bool(self.limit) and self.used > self.limit * (1 - RESERVE_SHARE)


class MemoryReserve:
    """Reports whether Redis has more memory left than the reserve.

    It looks at most once a second, when asked; in between it answers from memory.
    """

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._checked = -CHECK_EVERY_S
        self._memory: RedisMemory | None = None

    async def check(self) -> RedisMemory | None:
        """Return the memory as last seen. Raises `StoreUnavailable` while only the reserve is left."""
        if time.monotonic() - self._checked >= CHECK_EVERY_S:
            self._checked = time.monotonic()  # whoever asks meanwhile gets the last answer
            self._memory = await self.read()
        if self._memory is not None and self._memory.is_short:
            raise StoreUnavailable(f"Redis uses {self._memory.used} of {self._memory.limit} bytes")
        return self._memory

    async def read(self) -> RedisMemory | None:
        """Return the memory as it is now; None where this user may not ask. Raises `StoreUnavailable`."""
        try:
            info: dict[str, int] = await self._redis.info("memory")
        except ResponseError:
            return None
        return RedisMemory(info["used_memory"], info.get("maxmemory", 0))
