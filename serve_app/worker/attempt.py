"""Runs one attempt at a job under a lease that heartbeats extend, then commits, fails or releases it."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TypeVar

from serve_app.domain.errors import FailureCode, StoreUnavailable
from serve_app.domain.jobs import (
    ALL_READ,
    Claim,
    CommitReply,
    Failure,
    HeartbeatReply,
    Lease,
    StoredImage,
    Timings,
    Unread,
    new_image_id,
)
from serve_app.domain.requests import GenerationRequest, is_composite
from serve_app.engine_options import WorkerTiming
from serve_app.jobs.images import ImageStore
from serve_app.jobs.moderation import Moderation, ModerationUnavailable
from serve_app.jobs.previews import PreviewStore
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.workers import RecentAdapters
from serve_app.log import log_ids
from serve_app.loras.weights import WeightStore
from serve_app.marking.certificates import CertificateEnded
from serve_app.marking.drawing_texts import drawing_texts
from serve_app.marking.marker import Marker, marks_of
from serve_app.marking.xmp import SourceType
from serve_app.store.process import Process
from serve_app.worker.executor import Executor, FinishedRun, NotLoaded, Pixels, RunFailed, generation_failed
from serve_app.worker.image_files import encode, generator_name, write_previews
from serve_app.worker.reports import AttemptTimes, ImageTimes, trace_attempt
from serve_app.worker.step_thread import StepFailed, StepThread


@dataclass(frozen=True, slots=True)
class Completed:
    images: tuple[StoredImage, ...]
    seconds: float
    timings: Timings
    unread: Unread


@dataclass(frozen=True, slots=True)
class Failed:
    failure: Failure
    retry: bool


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """This attempt no longer holds the lease."""


@dataclass(frozen=True, slots=True)
class Released:
    """The worker drains, or lacks what the job needs: the job returns to its place in the queue, after a pause."""

    pause: timedelta = timedelta()


NOT_LOADED_PAUSE = timedelta(seconds=15)
"""A job is offered again this long after a worker lacked what it needs. Generators that restart take longer."""


Outcome = Completed | Failed | LeaseLost | Released


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""A store that does not answer is tried again after the first of these seconds, and at most the second between later
tries."""

Answer = TypeVar("Answer")


async def retry_until_available(ask: Callable[[], Awaitable[Answer]], *, within: timedelta | None = None) -> Answer:
    """Call a store until it answers, or raise its `StoreUnavailable` once `within` has passed.

    Every script may run twice and every object has its attempt's name, so a repeated call does no harm.
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


class WorkerParts:
    """What a worker reads and writes, besides its executor."""

    def __init__(self, process: Process) -> None:
        """Compose the parts. Raises `BadModeration` and `BadMarking`."""
        redis, settings = process.redis, process.settings
        self.settings = settings
        self.queue = JobQueue(redis, settings)
        self.images = ImageStore(settings, process.measures)
        self.previews = PreviewStore(redis)
        self.moderation = Moderation(settings)
        self.marker = Marker(settings) if settings.mark_images else None
        self.recent_adapters = RecentAdapters(redis)
        self.weights = WeightStore(settings)
        self.measures = process.measures
        self.traces = process.traces


log = logging.getLogger(__name__)


class Attempt:
    """Runs a claimed job. `draining` completes when the worker must stop: an unfinished job is released then."""

    def __init__(
        self,
        claim: Claim,
        *,
        parts: WorkerParts,
        executor: Executor,
        steps: StepThread,
        encoders: ThreadPoolExecutor,
        timing: WorkerTiming,
        draining: asyncio.Future[None],
    ) -> None:
        self._claim = claim
        self._parts = parts
        self._executor = executor
        self._steps = steps
        self._encoders = encoders
        self._timing = timing
        self._drain_requested = draining
        lease = claim.lease
        self._run_ids = [f"{lease.job_id}.{lease.attempt}.{index}" for index in range(claim.request.num_images)]
        self._started = False
        self._written: list[str] = []
        self._times = AttemptTimes()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._unread = ALL_READ

    @property
    def lease(self) -> Lease:
        return self._claim.lease

    @property
    def pending_runs(self) -> int:
        """Return the number of runs that have not been added to the executor yet."""
        return 0 if self._started else len(self._run_ids)

    async def run(self) -> None:
        """Run the attempt to its end.

        Every line that is logged meanwhile names the job, the attempt, the account and the request.
        """
        lease, claim = self._claim.lease, self._claim
        with log_ids(
            request_id=claim.request_id, account_id=claim.account_id, job_id=lease.job_id, attempt=lease.attempt
        ):
            await self._run()

    async def _run(self) -> None:
        making = asyncio.create_task(self._make())
        previews = self._write_previews()
        try:
            outcome = await self._wait_for_outcome(making)
            self._times.committing = time.monotonic()
            reply = await self._commit(outcome)
            name = type(outcome).__name__
            trace_attempt(self._parts.traces, self._claim, self._times, outcome=name, reply=reply)
            log.info("job %s: attempt %d %s, %s", *astuple(self._claim.lease), name, reply)
            if not isinstance(outcome, Completed) or reply not in (CommitReply.OK, CommitReply.DUPLICATE):
                await self._discard()
        finally:
            making.cancel()
            if previews is not None:
                previews.cancel()

    async def _wait_for_outcome(self, making: asyncio.Task[Outcome]) -> Outcome:
        limit = self._timing.job_limit.total_seconds()
        done, _ = await asyncio.wait(
            {making, self._lost, self._drain_requested}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
        )
        if making in done:
            return self._outcome_of(making)
        making.cancel()
        await asyncio.wait({making})
        if self._lost in done:
            return self._outcome_of_loss(HeartbeatReply(self._lost.result()))
        if self._drain_requested in done:
            return Released()
        return Failed(Failure(code=FailureCode.TIMEOUT, message=f"Not finished within {limit:g} s."), retry=False)

    def _outcome_of(self, making: asyncio.Task[Outcome]) -> Outcome:
        error = making.exception()
        if error is None:
            return making.result()
        log.error("job %s: attempt %d raised", self._claim.lease.job_id, self._claim.lease.attempt, exc_info=error)
        return Failed(generation_failed("The image could not be made."), retry=True)

    async def _make(self) -> Outcome:
        futures = self._steps.expect(self._run_ids, self._claim.work / len(self._run_ids))
        storing: list[asyncio.Task[StoredImage]] = []
        began = time.monotonic()
        try:
            await self._executor.start(self._claim, self._run_ids)
            self._times.loading, self._times.loaded = began, time.monotonic()
            self._started = True
            self._steps.wake()
            storing = [asyncio.create_task(self._store_image(index, future)) for index, future in enumerate(futures)]
            stored = await asyncio.gather(*storing)
            return Completed(tuple(stored), self._steps.seconds(self._run_ids), self._times.timings(), self._unread)
        except RunFailed as error:
            return Failed(error.failure, retry=error.retry)
        except (NotLoaded, CertificateEnded) as error:
            log.warning("job %s: it waits: %s", self._claim.lease.job_id, error.message)
            return Released(NOT_LOADED_PAUSE)
        except StepFailed:
            return Failed(generation_failed("The image could not be made."), retry=True)
        except ModerationUnavailable:
            return Failed(generation_failed("The image could not be checked by moderation."), retry=True)
        except StoreUnavailable:
            return Failed(generation_failed("The image could not be stored."), retry=True)
        finally:
            self._started = True
            self._steps.forget(self._run_ids)
            for task in storing:
                task.cancel()

    async def _store_image(self, index: int, future: asyncio.Future[FinishedRun]) -> StoredImage:
        """Wait for one run and store its image."""
        run = await future
        decoded = time.monotonic()
        if run.image is None:
            failure = run.failure or generation_failed("The image could not be made.")
            raise RunFailed(failure, retry=failure.code is FailureCode.OUT_OF_MEMORY)
        self._unread = run.unread  # all images of a job have the same texts
        lease, form, pixels = self._claim.lease, self._claim.request.output_format, run.image
        loop = asyncio.get_running_loop()
        content = await loop.run_in_executor(self._encoders, self._encoded, index, pixels)
        verdict = await self._parts.moderation.image(
            account_id=self._claim.account_id, job_id=lease.job_id, content=content
        )
        if not verdict.allowed:
            raise RunFailed(generation_failed("The image was refused by this service's moderation."), retry=False)
        name = self._parts.images.object_name(
            self._claim.account_id, lease.job_id, lease.attempt, index, self._claim.created_at, form
        )
        self._written.append(name)
        uri = await retry_until_available(
            lambda: self._parts.images.put(name, content), within=self._parts.settings.lease
        )
        self._times.images.append(ImageTimes(decoded, run.decode_seconds, time.monotonic()))
        height, width = pixels.shape[:2]
        return StoredImage(
            image_id=new_image_id(),
            image_uri=uri,
            width=width,
            height=height,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
        )

    def _encoded(self, index: int, pixels: Pixels) -> bytes:
        """Return the file of an image, marked where the service marks; a thread calls it."""
        request, parts = self._claim.request, self._parts
        job_id = self._claim.lease.job_id if parts.settings.png_job_id else None
        texts: Mapping[str, str] = {}
        if isinstance(request, GenerationRequest) and request.embed_settings:
            texts = drawing_texts(request, index, generator_name())

        def write(pixels: Pixels, xmp: str = "") -> bytes:
            return encode(pixels, request.output_format, quality=request.quality, job_id=job_id, texts=texts, xmp=xmp)

        if parts.marker is None:
            return write(pixels)
        source = SourceType.COMPOSITE if is_composite(request) else SourceType.GENERATED
        return parts.marker.mark(pixels, request.output_format, source, write)

    def hear(self, reply: str) -> None:
        """Take the reply to a heartbeat: any but `OK` ends the attempt."""
        if reply != HeartbeatReply.OK and not self._lost.done():
            self._lost.set_result(reply)

    def _outcome_of_loss(self, reply: HeartbeatReply) -> Outcome:
        if reply is HeartbeatReply.CANCEL:
            return Failed(Failure(code=FailureCode.CANCELED, message="The job was canceled."), retry=False)
        if reply is HeartbeatReply.FORBIDDEN:
            message = "The account may no longer use this LoRA."
            return Failed(Failure(code=FailureCode.LORA_UNAVAILABLE, message=message), retry=False)
        return LeaseLost()

    def _write_previews(self) -> asyncio.Task[None] | None:
        """Start to write previews, except where moderation has yet to see the images."""
        executor, parts = self._executor, self._parts
        if not parts.settings.previews or parts.moderation.is_on or not executor.shows_unfinished:
            return None
        job_id = self._claim.lease.job_id
        writing = write_previews(job_id, self._run_ids, executor, parts.previews, self._encoders)
        return asyncio.create_task(writing)

    def progress(self) -> int:
        """Return the percentage over all images, at most 99."""
        live = self._executor.progress()
        done = 0.0
        for run_id in self._run_ids:
            steps, total = live.get(run_id, (1, 1) if self._steps.is_finished(run_id) else (0, 1))
            done += steps / max(1, total)
        return min(99, int(100 * done / len(self._run_ids)))

    async def _commit(self, outcome: Outcome) -> CommitReply:
        queue, lease = self._parts.queue, self._claim.lease
        if isinstance(outcome, Completed):
            first = outcome.images[0]
            return await retry_until_available(
                lambda: queue.finish(
                    lease,
                    outcome.images,
                    seconds=outcome.seconds,
                    timings=outcome.timings,
                    marks=marks_of(first.width, first.height) if self._parts.marker else (),
                    unread=outcome.unread,
                )
            )
        if isinstance(outcome, Failed):
            return await retry_until_available(lambda: queue.fail(lease, outcome.failure, retry=outcome.retry))
        if isinstance(outcome, Released):
            return await retry_until_available(lambda: queue.release(lease, pause=outcome.pause))
        return CommitReply.FENCED  # the lease is lost: this attempt may write nothing

    async def _discard(self) -> None:
        """Delete what this attempt wrote: no other attempt uses its names."""
        for name in self._written:
            try:
                await self._parts.images.delete(self._parts.images.uri(name))
            except StoreUnavailable:
                log.warning("job %s: an object is left to the sweeper", self._claim.lease.job_id)
