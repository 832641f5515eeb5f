"""Lets callers wait until jobs end, and listen to what becomes of them, with one look at Redis for all of them."""

import asyncio
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from serve_app.domain.accounts import Caller
from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import JobState
from serve_app.jobs.history import JobReader
from serve_app.jobs.previews import WATCHED_FOR, Preview, PreviewStore, read_previews
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import pairs

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SHARE_OF_ACCOUNT = 4
"""One account may take at most a quarter of the places."""
ANNOUNCE_EVERY_S = WATCHED_FOR.total_seconds() / 2
COUNTED_FOR = timedelta(days=1)
"""Who waits is known for this long after the last has begun, far beyond any wait."""


class JobLook(NamedTuple):
    """What a look has found of a job. `previews` are the newest of its unfinished images, by index."""

    state: str
    """It is empty once the job is gone."""
    attempt: int
    progress: int
    previews: Mapping[int, Preview]

    @property
    def has_ended(self) -> bool:
        return self.state not in (JobState.QUEUED, JobState.RUNNING)


class Watch:
    """One caller's place. It keeps only the newest look, however slowly the caller takes them."""

    def __init__(self, joined: int, *, only_end: bool) -> None:
        self.joined, self.only_end = joined, only_end
        self.is_over = False
        """Whether nothing more will be told: this process is about to end, or the caller has gone."""
        self._look: JobLook | None = None
        self._told = asyncio.Event()

    async def next(self, seconds: float) -> JobLook | None:
        """Return what was found since the last call, waiting `seconds` for it; None if nothing was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self.is_over else seconds):
                await self._told.wait()
        self._told.clear()
        look, self._look = self._look, None
        return look

    def tell(self, look: JobLook) -> None:
        if look.has_ended or not self.only_end:
            self._look = look
            self._told.set()

    def end(self) -> None:
        self.is_over = True
        self._told.set()


class SharedCalls:
    """Knows who waits with one idempotency key, in all processes: its job goes on while anybody does.

    Each waits by a name of its own, so that a call may be sent twice. A caller whose process died is never known to
    have left, and the job goes on to its end.
    """

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def begin(self, caller: Caller, idempotency_key: str, waiter: str) -> None:
        """Note who begins to wait; `end` is called when it has gone or been answered."""
        pipeline = self._redis.pipeline()
        pipeline.sadd(_shared_key(caller, idempotency_key), waiter)
        pipeline.pexpire(_shared_key(caller, idempotency_key), COUNTED_FOR)
        await pipeline.execute()

    async def end(self, caller: Caller, idempotency_key: str, waiter: str) -> bool:
        """Return whether nobody waits any more."""
        pipeline = self._redis.pipeline()
        pipeline.srem(_shared_key(caller, idempotency_key), waiter)
        pipeline.scard(_shared_key(caller, idempotency_key))
        _, left = await pipeline.execute()
        return not left


def _shared_key(caller: Caller, idempotency_key: str) -> str:
    digest = hashlib.sha256(idempotency_key.encode()).hexdigest()
    # `shared_calls` is of another type: versions of 27 November 2026 counted callers there.
    return redis_key("shared_waiters", caller.account_id, caller.variant, digest)


@dataclass(slots=True)
class _Watched:
    """A job, who watches it, and the text that `changes.lua` last told of it."""

    watches: set[Watch] = field(default_factory=set[Watch])
    known: str = ""
    previews: Mapping[int, Preview] = field(default_factory=dict[int, Preview])
    is_running: bool = False
    announced_at: float = -ANNOUNCE_EVERY_S


class JobWaits:
    """Places for `most` callers that wait for jobs to end, or listen to their progress.

    However many there are, Redis is asked once every `LOOK_EVERY_S` which of their jobs have changed: a caller holds
    neither a connection nor a turn, and no message can be lost. With `previews`, workers are asked for those of every
    running job that somebody listens to.
    """

    def __init__(self, jobs: JobReader, *, most: int, previews: PreviewStore | None = None) -> None:
        self._jobs = jobs
        self._most = most
        self._previews = previews
        self._watched: defaultdict[str, _Watched] = defaultdict(_Watched)
        self._accounts: defaultdict[str, int] = defaultdict(int)
        self.is_draining = False
        """Whether this process is about to end, so that nobody waits here any more."""
        self._looks = 0
        self._looking: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return sum(self._accounts.values())

    @property
    def streams(self) -> int:
        """How many of the callers listen to a job's progress."""
        return sum(not watch.only_end for watched in self._watched.values() for watch in watched.watches)

    async def until_ended(self, job_id: str, *, account_id: str, seconds: float) -> bool:
        """Return once the job has ended, or after `seconds`; False at once when too many wait already."""
        with self.watch(job_id, account_id=account_id, only_end=True) as watch:
            if watch is None:
                return False
            await watch.next(seconds)
            return True

    @contextmanager
    def watch(self, job_id: str, *, account_id: str, only_end: bool = False) -> Generator[Watch | None]:
        """Hold a place, in which the next look at the job is told, and then its changes; None if all are taken."""
        if self.count >= self._most or self._accounts[account_id] >= max(1, self._most // SHARE_OF_ACCOUNT):
            yield None
            return
        watch, watched = Watch(self._looks, only_end=only_end), self._watched[job_id]
        watch.is_over = self.is_draining
        watched.watches.add(watch)
        watched.known = ""
        self._accounts[account_id] += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_until_nobody_watches(), name="jobs watched")
        try:
            yield watch
        finally:
            watched.watches.discard(watch)
            if not watched.watches:
                del self._watched[job_id]
            self._accounts[account_id] -= 1
            if not self._accounts[account_id]:
                del self._accounts[account_id]

    def end_all(self) -> None:
        """Let everybody go, and whoever still comes: this process is about to end, and another will serve them."""
        self.is_draining = True
        for watched in self._watched.values():
            for watch in watched.watches:
                watch.end()

    async def _look_until_nobody_watches(self) -> None:
        try:
            while self._watched:
                await asyncio.sleep(LOOK_EVERY_S)
                try:
                    await self._announce()
                    await self._look()
                except AtelierError as error:
                    log.debug("jobs waited for were not looked at: %s", error.message)
        finally:
            self._looking = None

    async def _look(self) -> None:
        """Tell what has changed. A watch that joined meanwhile is told by the next look, and never what is older."""
        self._looks += 1
        look = self._looks
        known = {job_id: watched.known for job_id, watched in self._watched.items()}
        for job_id, text, rows in await self._jobs.changes(known):
            watched = self._watched.get(job_id)
            if watched is None:
                continue
            state, attempt, progress, _ = text.split(" ")
            watched.previews = {**watched.previews, **read_previews(pairs(rows))}
            watched.is_running = state == JobState.RUNNING
            found = JobLook(state, int(attempt), int(progress), watched.previews)
            told = [watch for watch in watched.watches if watch.joined < look]
            watched.known = text if len(told) == len(watched.watches) else ""
            for watch in told:
                watch.tell(found)

    async def _announce(self) -> None:
        """Ask the workers of running jobs that somebody listens to for previews."""
        now = time.monotonic()
        due = {
            job_id: watched
            for job_id, watched in self._watched.items()
            if watched.is_running
            and now - watched.announced_at >= ANNOUNCE_EVERY_S
            and not all(watch.only_end for watch in watched.watches)
        }
        if self._previews is None or not due:
            return
        await self._previews.watch(*due)
        for watched in due.values():
            watched.announced_at = now
