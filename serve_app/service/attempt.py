"""One attempt on one job: make its images under a lease that is kept alive, then commit, give up or hand back."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from serve_app.domain.errors import FailureCode, StoreUnavailable
from serve_app.domain.jobs import BeatReply, Claim, CommitReply, Failure, StoredImage, new_image_id
from serve_app.domain.requests import GenerationRequest
from serve_app.service.bench import Bench, CannotStart, FinishedRun
from serve_app.service.png import encode_png
from serve_app.service.resources import Resources
from serve_app.service.step_thread import StepFailed, StepThread

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between tries of a store that does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often a worker looks, and how long it waits before it calls something dead."""

    poll: timedelta = timedelta(seconds=0.5)
    """An idle worker asks for work this often when no hint comes."""
    beat: timedelta = timedelta(seconds=1)
    """Progress is written, and a cancel noticed, this often; a third of the lease at the latest."""
    step_limit: timedelta = timedelta(minutes=3)
    """A step that takes longer is hung: its leases are left to expire and the replica reports itself unhealthy."""
    job_limit: timedelta = timedelta(minutes=30)
    """An attempt that takes longer fails with `timeout`."""
    open_jobs: int = 64
    """Jobs begun and not committed: what bounds the images held in memory while storage is slow."""


@dataclass(frozen=True, slots=True)
class Made:
    images: tuple[StoredImage, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    failure: Failure
    retry: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is someone else's now: this attempt may write nothing more."""


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The worker is leaving: the job goes back to its place in the queue."""


Ending = Made | GivenUp | Lost | HandedBack


Answer = TypeVar("Answer")


class RunFailed(Exception):
    """A run ended without an image."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Attempt:
    """`leaving` is done when the worker must stop: what is not finished by then is handed back."""

    def __init__(
        self,
        claim: Claim,
        *,
        resources: Resources,
        bench: Bench,
        steps: StepThread,
        encoders: Executor,
        pace: Pace,
        leaving: asyncio.Future[None],
    ) -> None:
        self._claim = claim
        self._resources = resources
        self._bench = bench
        self._steps = steps
        self._encoders = encoders
        self._pace = pace
        self._leaving = leaving
        lease = claim.lease
        self._keys = [f"{lease.job_id}.{lease.attempt}.{index}" for index in range(num_images(claim))]
        self._started = False
        self._written: list[str] = []

    @property
    def rows_to_come(self) -> int:
        """Rows that the bench does not know of yet."""
        return 0 if self._started else len(self._keys)

    async def run(self) -> None:
        making = asyncio.create_task(self._make())
        beating = asyncio.create_task(self._beat_until_lost())
        try:
            ending = await self._ending(making, beating)
            await self._settle(ending)
        finally:
            making.cancel()
            beating.cancel()

    async def _ending(self, making: asyncio.Task[Ending], beating: asyncio.Task[Ending]) -> Ending:
        limit = self._pace.job_limit.total_seconds()
        done, _ = await asyncio.wait(
            {making, beating, self._leaving}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
        )
        if making in done:
            return self._outcome(making)
        making.cancel()
        await asyncio.wait({making})
        if beating in done:
            return beating.result()
        if self._leaving in done:
            return HandedBack()
        return GivenUp(Failure(code=FailureCode.TIMEOUT, message=f"Not finished within {limit:g} s."), retry=False)

    def _outcome(self, making: asyncio.Task[Ending]) -> Ending:
        error = making.exception()
        if error is None:
            return making.result()
        log.error("job %s: attempt %d broke", self._claim.lease.job_id, self._claim.lease.attempt, exc_info=error)
        return GivenUp(_generation_failed("The image could not be made."), retry=True)

    async def _make(self) -> Ending:
        futures = self._steps.expect(self._keys)
        keeping: list[asyncio.Task[StoredImage]] = []
        try:
            await self._bench.start(self._claim, self._keys)
            self._started = True
            self._steps.wake()
            keeping = [asyncio.create_task(self._keep(index, future)) for index, future in enumerate(futures)]
            kept = await asyncio.gather(*keeping)
            return Made(tuple(kept), self._steps.seconds(self._keys))
        except CannotStart as error:
            return GivenUp(error.failure, retry=error.retry)
        except RunFailed as error:
            return GivenUp(error.failure, retry=error.failure.code is FailureCode.OUT_OF_MEMORY)
        except StepFailed:
            return GivenUp(_generation_failed("The image could not be made."), retry=True)
        except StoreUnavailable:
            return GivenUp(_generation_failed("The image could not be stored."), retry=True)
        finally:
            self._started = True
            self._steps.forget(self._keys)
            for task in keeping:
                task.cancel()

    async def _keep(self, index: int, future: asyncio.Future[FinishedRun]) -> StoredImage:
        """Wait for one run and store its image."""
        run = await future
        if run.image is None:
            raise RunFailed(run.failure or _generation_failed("The image could not be made."))
        lease, loop = self._claim.lease, asyncio.get_running_loop()
        pixels = run.image
        named = lease.job_id if self._resources.settings.png_job_id else None
        png = await loop.run_in_executor(self._encoders, lambda: encode_png(pixels, job_id=named))
        name = self._resources.images.object_name(
            self._claim.account_id, lease.job_id, lease.attempt, index, self._claim.created_at
        )
        self._written.append(name)
        uri = await patiently(lambda: self._resources.images.put(name, png), within=self._resources.settings.lease)
        height, width = pixels.shape[:2]
        return StoredImage(
            image_id=new_image_id(),
            image_uri=uri,
            width=width,
            height=height,
            sha256=hashlib.sha256(png).hexdigest(),
            size_bytes=len(png),
        )

    async def _beat_until_lost(self) -> Ending:
        every = min(self._pace.beat, self._resources.settings.lease / 3).total_seconds()
        while True:
            await asyncio.sleep(every)
            if self._steps.step_age > self._pace.step_limit:
                continue  # a hung step must not keep its jobs from another worker
            try:
                reply = await self._resources.jobs.beat(self._claim.lease, progress=self._progress())
            except StoreUnavailable:
                continue
            if reply is BeatReply.CANCEL:
                return GivenUp(Failure(code=FailureCode.CANCELED, message="The job was canceled."), retry=False)
            if reply is BeatReply.FENCED:
                return Lost()

    def _progress(self) -> int:
        """Whole percent over all images; 100 is reached only by finishing."""
        live = self._bench.progress()
        done = 0.0
        for key in self._keys:
            steps, total = live.get(key, (1, 1) if self._steps.is_finished(key) else (0, 1))
            done += steps / max(1, total)
        return min(99, int(100 * done / len(self._keys)))

    async def _settle(self, ending: Ending) -> None:
        jobs, lease = self._resources.jobs, self._claim.lease
        match ending:
            case Made(images, seconds):
                reply = await patiently(lambda: jobs.finish(lease, images, seconds=seconds))
            case GivenUp(failure, retry):
                reply = await patiently(lambda: jobs.fail(lease, failure, retry=retry))
            case HandedBack():
                reply = await patiently(lambda: jobs.hand_back(lease))
            case Lost():
                reply = CommitReply.FENCED
        log.info("job %s: attempt %d %s, %s", lease.job_id, lease.attempt, type(ending).__name__, reply)
        if not isinstance(ending, Made) or reply not in (CommitReply.OK, CommitReply.DUPLICATE):
            await self._discard()

    async def _discard(self) -> None:
        """Delete what this attempt wrote: its names are its own, so no other attempt can miss them."""
        for name in self._written:
            try:
                await self._resources.images.delete(self._resources.images.uri(name))
            except StoreUnavailable:
                log.warning("job %s: an object is left to the sweeper", self._claim.lease.job_id)


async def patiently(ask: Callable[[], Awaitable[Answer]], *, within: timedelta | None = None) -> Answer:
    """Ask a store until it answers, or raise its `StoreUnavailable` once `within` has passed.

    Every script may run twice and every object has its attempt's name, so asking again does no harm.
    """
    loop = asyncio.get_running_loop()
    deadline = None if within is None else loop.time() + within.total_seconds()
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            if deadline is not None and loop.time() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def num_images(claim: Claim) -> int:
    return claim.request.num_images if isinstance(claim.request, GenerationRequest) else 1


def _generation_failed(message: str) -> Failure:
    return Failure(code=FailureCode.GENERATION_FAILED, message=message)
