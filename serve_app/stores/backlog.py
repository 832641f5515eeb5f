"""What waits, read in one round trip: by the job store, and by the autoscaling thread, which cannot await."""

from collections.abc import Sequence
from typing import Any

from serve_app.domain.jobs import Backlog, JobKind
from serve_app.stores.records import DEFAULT_PACE, MILLI
from serve_app.stores.redis import connect_sync, key, reaching_redis


def read_backlog(redis_url: str, kind: JobKind) -> Backlog:
    """The backlog through a blocking client. Raises `StoreUnavailable`."""
    with reaching_redis(), connect_sync(redis_url) as client:
        pipeline = client.pipeline(transaction=False)
        ask_backlog(pipeline, kind)
        return backlog_from(kind, pipeline.execute())


def ask_backlog(pipeline: Any, kind: JobKind) -> None:
    """Put the questions that `backlog_from` reads the answers of."""
    pipeline.hmget(key("load", kind), "ready", "work", "pace")
    pipeline.zcard(key("lease", kind))
    pipeline.zcard(key("delay", kind))
    pipeline.zrange(key("age", kind), 0, 0, withscores=True)
    pipeline.time()


def backlog_from(kind: JobKind, answer: Sequence[Any]) -> Backlog:
    (ready, work, pace), leased, delayed, oldest, (seconds, micros) = answer
    now_ms = seconds * 1000 + micros // 1000
    return Backlog(
        ready=int(ready or 0),
        leased=leased,
        delayed=delayed,
        seconds=int(work or 0) / MILLI * (float(pace) if pace else DEFAULT_PACE[kind]),
        oldest_age_s=max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0,
    )
