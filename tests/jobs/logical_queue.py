"""A job queue whose scripts read a clock that the test sets."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.history import DeadLetters, JobReader
from serve_app.jobs.queue import Fairness, JobQueue
from serve_app.jobs.workers import RecentAdapters
from serve_app.settings import Settings
from serve_app.store.keys import PREFIX
from serve_app.store.redis_client import connect
from serve_app.store.script import Script
from tests.support import plain_redis

CLOCK = PREFIX + "test-clock"
_REAL = """local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_LOGICAL = "local now = tonumber(redis.call('GET', P .. 'test-clock'))\n"
START_MS = 1_800_000_000_000
"""2027-01-15T08:00:00Z."""


def logical_clock(name: str, text: str) -> str:
    """A script's text with its clock read from `CLOCK`."""
    assert text.count(_REAL) == 1, f"{name}.lua does not read the clock as expected"
    return text.replace(_REAL, _LOGICAL)


def model_settings(data_dir: Path, **changes: Any) -> Settings:
    """Small limits, so that a short run meets them all."""
    limits: dict[str, Any] = {
        "data_dir": data_dir,
        "redis_url": "unix:///nowhere",
        "max_attempts": 3,
        "max_queued": 10,
        "max_queued_per_account": 4,
        "queue_age_limit": timedelta(hours=1),
        "lease": timedelta(seconds=30),
    }
    return Settings(**{**limits, **changes})


def roomy_settings(data_dir: Path) -> Settings:
    """Limits so high that no scenario meets one it is not about."""
    return model_settings(data_dir, max_queued=100, max_queued_per_account=100)


class LogicalQueue(JobQueue):
    """A queue in a database of its own, with its reads, at a time of the test's choosing."""

    def __init__(self, url: str, settings: Settings, *, fairness: Fairness | None = None, database: int = 0) -> None:
        self.settings = settings
        self.fairness = fairness or Fairness()
        self.client = connect(f"{url}?db={database}")
        self.sync = plain_redis(f"{url}?db={database}")
        super().__init__(self.client, settings, fairness=self.fairness, rewrite=logical_clock)
        self.reader = JobReader(self.client, rewrite=logical_clock)
        self.stats = QueueStats(self.client)
        self.recent_adapters = RecentAdapters(self.client, rewrite=logical_clock)
        self.dead_letters = DeadLetters(self.client, settings, rewrite=logical_clock)
        self.grant = Script(self.client, "loras/grant_lora", logical_clock)
        self.now = START_MS
        self.sync.flushdb()
        self.advance(0)

    def advance(self, ms: int) -> None:
        self.now += ms
        self.sync.set(CLOCK, self.now, px=3_600_000)

    async def close(self) -> None:
        self.sync.close()
        await self.client.aclose()
