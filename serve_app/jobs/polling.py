"""Reads a job for the holder of an API key in one round trip, and lets callers wait until jobs end."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from serve_app.accounts.auth import anonymous, auth_query
from serve_app.domain.accounts import AuthResult
from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.jobs.history import JobReader
from serve_app.jobs.records import read_snapshot
from serve_app.settings import Settings
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Rewrite, Script


class Poll(NamedTuple):
    """The caller, and the job; None if the caller may not see it."""

    auth: AuthResult
    job: Job | None


class Poller:
    """Reads a job for the holder of a key; refuses a key that polls too fast without asking Redis.

    The bound is of this process, so that polls stay reads: a count in Redis would be a write, synced to disk.
    """

    def __init__(
        self,
        redis: RedisClient,
        settings: Settings,
        *,
        rewrite: Rewrite | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._poll = Script(redis, "jobs/poll", rewrite, writes=False)
        self._clock = clock
        self._second = 0
        self._counts: dict[tuple[str, str, Variant], int] = {}
        self._known: dict[tuple[str, str, Variant], AuthResult] = {}

    async def poll(self, secret: str, variant: Variant, job_id: str, *, of: Variant | None) -> Poll:
        """Authenticate without counting, and read the account's job, in one script.

        With `of`, only a job that was made on that interface is read, without its request, which the interface does not
        show. A valid key that polls more than `polls_per_second` times in a second gets a limited poll, without a job.
        Raises `UnreadableRecord`, `StoreUnavailable`.
        """
        query = auth_query(secret, variant, self._settings)
        if query is None:
            return Poll(anonymous(variant, self._settings), None)
        key = (query.key.id, query.key.digest, variant)
        if self._count(key) > self._settings.polls_per_second and key in self._known:
            return Poll(replace(self._known[key], limited=True), None)
        caller, snapshot = await self._poll(**query.args, job_id=job_id, job_interface=of)
        auth = query.read(caller)
        if auth.caller is not None:
            self._known[key] = auth
        return Poll(auth, read_snapshot(snapshot, with_request=of is None))

    def _count(self, key: tuple[str, str, Variant]) -> int:
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._counts.clear()
            self._known.clear()
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]


log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SHARE_OF_ACCOUNT = 4
"""One account may take one in so many of the places."""


class JobWaits:
    """Places for `most` callers that wait for jobs to end.

    However many wait, Redis is asked once every `LOOK_EVERY_S` which of their jobs have ended: a caller that waits
    holds neither a connection nor a turn, and no message can be lost.
    """

    def __init__(self, jobs: JobReader, *, most: int) -> None:
        self._jobs = jobs
        self._most = most
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._accounts: defaultdict[str, int] = defaultdict(int)
        self._looking: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return sum(self._accounts.values())

    async def until_ended(self, job_id: str, *, account_id: str, seconds: float) -> bool:
        """Return once the job has ended, or after so many seconds; False at once when too many wait already."""
        if self.count >= self._most or self._accounts[account_id] >= max(1, self._most // SHARE_OF_ACCOUNT):
            return False
        ended = asyncio.Event()
        self._waiting[job_id].add(ended)
        self._accounts[account_id] += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="jobs waited for")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await ended.wait()
        finally:
            self._leave(job_id, account_id, ended)
        return True

    def _leave(self, job_id: str, account_id: str, ended: asyncio.Event) -> None:
        self._waiting[job_id].discard(ended)
        if not self._waiting[job_id]:
            del self._waiting[job_id]
        self._accounts[account_id] -= 1
        if not self._accounts[account_id]:
            del self._accounts[account_id]

    async def _look(self) -> None:
        """Ask for all awaited jobs, until nobody waits any more."""
        try:
            while self._waiting:
                await asyncio.sleep(LOOK_EVERY_S)
                try:
                    for job_id in await self._jobs.ended(list(self._waiting)):
                        for ended in self._waiting.get(job_id, ()):
                            ended.set()
                except AtelierError as error:
                    log.debug("jobs waited for were not looked at: %s", error.message)
        finally:
            self._looking = None
