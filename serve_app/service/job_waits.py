"""Lets callers of one process wait for the end of jobs, with one query for all of them."""

import asyncio
import logging
from collections import defaultdict

from serve_app.domain.errors import AtelierError
from serve_app.stores.job_reader import JobReader

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SHARE_OF_ACCOUNT = 4
"""One account may have a quarter of the places."""


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
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            pass
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
