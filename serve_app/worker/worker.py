"""Worker loop: claims jobs that fit and runs each attempt."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import Claim
from serve_app.jobs.queue import new_nonce
from serve_app.log import log_ids
from serve_app.marking.certificates import CertificateEnded
from serve_app.marking.marker import Marker
from serve_app.store.process import repeat
from serve_app.worker.attempt import Attempt, WorkerParts, WorkerTiming
from serve_app.worker.executor import Executor
from serve_app.worker.prefetch import AdapterPrefetch
from serve_app.worker.reports import REPORT_EVERY_S, report
from serve_app.worker.step_thread import StepThread

log = logging.getLogger(__name__)

ENCODERS = 2
"""This many threads encode PNGs: zlib releases the interpreter's lock, so two suffice for one device."""
RELEASE_TIME = timedelta(seconds=2)
"""This much of a drain is reserved for releasing the unfinished jobs at its end."""
MAX_CLAIM_FAILURES = 20
"""This many rounds of the claim loop may fail one after the other, each by something other than a store that does not
answer."""


class Unhealthy(Exception):
    """The worker's process should be replaced."""


class Worker:
    """Keeps one executor busy: `start`, then `drain`; a hint makes it claim at once.

    Killed at any moment it loses no job: its leases run out and other workers take over.
    """

    def __init__(
        self, parts: WorkerParts, executor: Executor, *, name: str, timing: WorkerTiming | None = None
    ) -> None:
        self._parts = parts
        self._executor = executor
        self._name = name
        self._timing = timing or WorkerTiming()
        self._wake = asyncio.Event()
        self._steps = StepThread(executor, on_finished=self._wake.set)
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encoders")
        self._attempts: dict[asyncio.Task[None], Attempt] = {}
        self._draining = False
        self._nonce = new_nonce()
        self._claim_failures = 0
        self._prefetching: asyncio.Task[None] | None = None
        self._lacks_certificate = False

    def start(self) -> None:
        self._drain_requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps.start()
        self._claiming = asyncio.create_task(self._claim_until_drained())
        every = min(self._timing.heartbeat, self._parts.settings.lease / 3).total_seconds()
        beating = repeat("sending heartbeats", self._send_heartbeats, every, log.warning)
        self._beating = asyncio.create_task(beating, name=f"{self._name} heartbeats")
        reporting = partial(report, self._parts.measures, self._executor, worker=self._name, marker=self._parts.marker)
        self._reporting = asyncio.create_task(
            repeat("reporting", reporting, REPORT_EVERY_S, log.debug), name=f"{self._name} reports"
        )
        if self._timing.prefetch is not None:
            prefetch = AdapterPrefetch(self._parts, self._executor, worker=self._name)
            self._prefetching = asyncio.create_task(
                prefetch.run(self._timing.prefetch), name=f"{self._name} prefetches"
            )

    def hint(self) -> None:
        """Claim now instead of at the next poll."""
        self._wake.set()

    @property
    def open_jobs(self) -> int:
        return len(self._attempts)

    def check(self) -> None:
        """Raise `Unhealthy` when this worker should be replaced."""
        if self._claim_failures >= MAX_CLAIM_FAILURES:
            raise Unhealthy(f"the claim loop failed {self._claim_failures} times in a row")
        if self._is_stuck:
            raise Unhealthy(f"the executor fails every step, or one has taken too long ({self._steps.step_age})")

    @property
    def _is_stuck(self) -> bool:
        return self._steps.is_broken or self._steps.step_age > self._timing.step_limit

    async def drain(self, within: timedelta) -> None:
        """Claim nothing more, finish what is running, release what is not finished before `within` has passed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within.total_seconds()
        self._draining = True
        self._wake.set()
        if self._prefetching is not None:
            self._prefetching.cancel()
        await self._claiming
        await self._wait_for_attempts(deadline - RELEASE_TIME.total_seconds() - loop.time())
        if not self._drain_requested.done():
            self._drain_requested.set_result(None)
        await self._wait_for_attempts(deadline - loop.time())
        for task in self._attempts:
            task.cancel()
        self._reporting.cancel()
        self._beating.cancel()
        await self._steps.close(timedelta(seconds=max(0.0, deadline - loop.time())))
        self._executor.measure(self._parts.measures)
        self._encoders.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_attempts(self, seconds: float) -> None:
        if self._attempts and seconds > 0:
            await asyncio.wait(set(self._attempts), timeout=seconds)

    async def _claim_until_drained(self) -> None:
        """Claim until drained, through any failure: what a failed round had claimed is left to its leases."""
        while not self._draining:
            self._wake.clear()
            if not await self._try_to_claim():
                await self._wait_for_wake()

    async def _try_to_claim(self) -> bool:
        """Claim and start jobs; return whether there were any."""
        try:
            claims = await self._claim(self._nonce)
            self._nonce = new_nonce()
            for claim in claims:
                self._begin(claim)
        except StoreUnavailable:
            return False  # asked again under the same nonce: jobs given in a reply that was lost come back
        except Exception as error:
            self._nonce = new_nonce()
            self._claim_failures += 1
            log.error("worker %s: a round of claiming failed", self._name, exc_info=error)
            return False
        self._claim_failures = 0
        return bool(claims)

    async def _claim(self, nonce: str) -> list[Claim]:
        capacity = self._executor.free_runs - sum(attempt.pending_runs for attempt in self._attempts.values())
        if capacity <= 0 or self.open_jobs >= self._timing.open_jobs or self._is_stuck:
            return []
        if self._parts.marker is not None and not await self._can_mark(self._parts.marker):
            capacity = 0  # it asks all the same, and so is known to live
        return await self._parts.queue.claim(
            self._name, pool=self._executor.pool, nonce=nonce, resident=self._executor.resident, limit=capacity
        )

    async def _can_mark(self, marker: Marker) -> bool:
        """Return whether images can be marked. Where the certificate has ended, jobs wait in the queue for the next."""
        lacked, self._lacks_certificate = self._lacks_certificate, True
        try:
            await asyncio.to_thread(marker.renew)
            self._lacks_certificate = False
        except CertificateEnded as error:
            if not lacked:
                log.error("worker %s: takes no jobs until there is a new certificate: %s", self._name, error.message)
        return not self._lacks_certificate

    async def _wait_for_wake(self) -> None:
        try:
            async with asyncio.timeout(self._timing.poll.total_seconds()):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _begin(self, claim: Claim) -> None:
        attempt = Attempt(
            claim,
            parts=self._parts,
            executor=self._executor,
            steps=self._steps,
            encoders=self._encoders,
            timing=self._timing,
            draining=self._drain_requested,
        )
        task = asyncio.create_task(attempt.run(), name=claim.lease.job_id)
        self._attempts[task] = attempt
        task.add_done_callback(self._forget)

    async def _send_heartbeats(self) -> None:
        """Extend the leases of all attempts, unless a step hangs, which must not keep its jobs from another worker."""
        attempts = list(self._attempts.values())
        if attempts and self._steps.step_age <= self._timing.step_limit:
            with suppress(StoreUnavailable):  # leases outlive a short outage, of which claiming tells
                replies = await self._parts.queue.heartbeats({each.lease: each.progress() for each in attempts})
                for attempt, reply in zip(attempts, replies, strict=True):
                    attempt.hear(reply)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._attempts[task]
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            with log_ids(job_id=task.get_name()):
                log.error("job %s: left to its lease", task.get_name(), exc_info=error)
