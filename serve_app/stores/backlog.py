"""The backlog in one round trip, for asyncio and for the autoscaling thread, which cannot await."""

from collections.abc import Sequence
from typing import Any

from serve_app.domain.jobs import Backlog, JobKind
from serve_app.stores.estimates import DEFAULT_SECONDS_PER_UNIT, MILLI
from serve_app.stores.redis import connect_sync, redis_errors
from serve_app.stores.redis_keys import redis_key

SPEEDS = ("seconds_per_unit", "busy_seconds_per_unit")


def read_backlog(redis_url: str, kind: JobKind) -> Backlog:
    """Read the backlog through a blocking client. Raises `StoreUnavailable`."""
    with redis_errors(), connect_sync(redis_url) as client:
        pipeline = client.pipeline(transaction=False)
        ask_backlog(pipeline, kind)
        return backlog_from(kind, pipeline.execute())


def ask_backlog(pipeline: Any, kind: JobKind) -> None:
    """Add the commands whose answers `backlog_from` reads."""
    pipeline.hmget(redis_key("load", kind), "ready", "ready_work", "work", "accepted_work", *SPEEDS)
    pipeline.zcard(redis_key("lease", kind))
    pipeline.zcard(redis_key("delay", kind))
    pipeline.zrange(redis_key("age", kind), 0, 0, withscores=True)
    pipeline.time()


def backlog_from(kind: JobKind, answer: Sequence[Any]) -> Backlog:
    (ready, ready_work, work, accepted, speed, busy_speed), leased, delayed, oldest, (seconds, micros) = answer
    now_ms = seconds * 1000 + micros // 1000
    seconds_per_unit = float(speed) if speed else DEFAULT_SECONDS_PER_UNIT[kind]
    return Backlog(
        ready=int(ready or 0),
        leased=leased,
        delayed=delayed,
        ready_seconds=int(ready_work or 0) / MILLI * seconds_per_unit,
        seconds=int(work or 0) / MILLI * seconds_per_unit,
        oldest_age_s=max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0,
        accepted=int(accepted or 0) / MILLI,
        busy_seconds_per_unit=float(busy_speed) if busy_speed else seconds_per_unit,
    )
