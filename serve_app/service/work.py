"""Works on jobs: claims those there is room for, between steps, and sees each to its end."""

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import Claim
from serve_app.service.attempt import Attempt, Pace
from serve_app.service.bench import Bench
from serve_app.service.resources import Resources
from serve_app.service.step_thread import StepThread

log = logging.getLogger(__name__)

ENCODERS = 2
"""Threads that turn pixels into PNG bytes: zlib lets go of the interpreter, so two keep up with one device."""
LAST_WORDS = timedelta(seconds=2)
"""What handing back takes, kept free at the end of a drain."""


class Unhealthy(Exception):
    """This worker will do no more good: its process should be replaced."""


class Worker:
    """Keeps one bench busy. `start`, then `drain`; a hint makes it look for work at once.

    Killed at any moment it loses nothing: its leases run out and its jobs go to another worker.
    """

    def __init__(self, resources: Resources, bench: Bench, *, name: str, pace: Pace | None = None) -> None:
        self._resources = resources
        self._bench = bench
        self._name = name
        self._pace = pace or Pace()
        self._look = asyncio.Event()
        self._steps = StepThread(bench, on_finished=self._look.set)
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="png")
        self._attempts: dict[asyncio.Task[None], Attempt] = {}
        self._draining = False

    def start(self) -> None:
        self._leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps.start()
        self._claiming = asyncio.create_task(self._claim_until_drained())

    def hint(self) -> None:
        """There may be work: look now instead of at the next poll."""
        self._look.set()

    @property
    def open_jobs(self) -> int:
        return len(self._attempts)

    def check(self) -> None:
        """Raise `Unhealthy` when this worker should be replaced."""
        if self._claiming.done() and not self._draining:
            raise Unhealthy("the claim loop has ended")
        if self._is_stuck:
            raise Unhealthy(f"the bench fails every step, or one has taken too long ({self._steps.step_age})")

    @property
    def _is_stuck(self) -> bool:
        return self._steps.is_broken or self._steps.step_age > self._pace.step_limit

    async def drain(self, within: timedelta) -> None:
        """Claim nothing more, finish what is running, hand back what is not finished before `within` has passed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within.total_seconds()
        self._draining = True
        self._look.set()
        await self._claiming
        await self._wait_for_attempts(deadline - LAST_WORDS.total_seconds() - loop.time())
        if not self._leaving.done():
            self._leaving.set_result(None)
        await self._wait_for_attempts(deadline - loop.time())
        for task in self._attempts:
            task.cancel()
        await self._steps.close(timedelta(seconds=max(0.0, deadline - loop.time())))
        self._encoders.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_attempts(self, seconds: float) -> None:
        if self._attempts and seconds > 0:
            await asyncio.wait(set(self._attempts), timeout=seconds)

    async def _claim_until_drained(self) -> None:
        nonce = secrets.token_hex(8)
        while not self._draining:
            self._look.clear()
            try:
                claims = await self._claim(nonce)
            except StoreUnavailable:
                claims = []  # asked again under the same nonce: jobs given in a reply that was lost come back
            else:
                nonce = secrets.token_hex(8)
            for claim in claims:
                self._begin(claim)
            if not claims:
                await self._wait_for_a_look()

    async def _claim(self, nonce: str) -> list[Claim]:
        room = self._bench.free_rows - sum(attempt.rows_to_come for attempt in self._attempts.values())
        if room <= 0 or self.open_jobs >= self._pace.open_jobs or self._is_stuck:
            return []
        return await self._resources.jobs.claim(
            self._name, kind=self._bench.kind, nonce=nonce, resident=self._bench.resident, limit=room
        )

    async def _wait_for_a_look(self) -> None:
        try:
            async with asyncio.timeout(self._pace.poll.total_seconds()):
                await self._look.wait()
        except TimeoutError:
            pass

    def _begin(self, claim: Claim) -> None:
        attempt = Attempt(
            claim,
            resources=self._resources,
            bench=self._bench,
            steps=self._steps,
            encoders=self._encoders,
            pace=self._pace,
            leaving=self._leaving,
        )
        task = asyncio.create_task(attempt.run(), name=claim.lease.job_id)
        self._attempts[task] = attempt
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._attempts[task]
        self._look.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job %s: left to its lease", task.get_name(), exc_info=error)
