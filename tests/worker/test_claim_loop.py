"""The claim loop and the drain of a worker, with an executor that needs no model."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from serve_app.domain.jobs import Claim, JobState
from serve_app.worker.worker import MAX_CLAIM_FAILURES, Worker
from tests.composition import Resources
from tests.made_jobs import accept, job_of
from tests.rewriting import replacing
from tests.support import wait_until
from tests.worker.scripted_executor import QUICK, ScriptedExecutor, is_unhealthy, until, with_queue, working


async def test_the_claim_loop_outlives_a_failure_of_its_own(
    resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    executor = ScriptedExecutor()
    executor.resident_errors = [RuntimeError("the device is gone")] * 3
    job_id = await accept(resources)
    async with working(resources, executor) as worker:
        await until(resources, job_id, JobState.COMPLETED)
        worker.check()
    assert sum("a round of claiming failed" in record.message for record in caplog.records) == 3


async def test_a_claim_loop_that_only_fails_is_unhealthy(resources: Resources) -> None:
    executor = ScriptedExecutor()
    executor.resident_errors = [RuntimeError("the device is gone")] * (MAX_CLAIM_FAILURES + 1000)
    async with working(resources, executor) as worker:
        await wait_until(lambda: is_unhealthy(worker))


async def test_a_claim_that_is_not_answered_is_asked_again_under_its_nonce(resources: Resources) -> None:
    """The claim script runs and its reply is lost: the next call returns the same jobs."""
    lost = "redis.call('PEXPIRE', last_claim, 2 * lease_ms)\n  return redis.error_reply('TRYAGAIN the reply is lost')"
    losing = replacing("jobs/claim", "redis.call('PEXPIRE', last_claim, 2 * lease_ms)", lost)
    job_id = await accept(resources)
    async with working(with_queue(resources, losing), ScriptedExecutor()):
        await until(resources, job_id, JobState.COMPLETED, attempt=1)


class TwoPlaces(ScriptedExecutor):
    @property
    def free_runs(self) -> int:
        return 2 - len(self.progress())


async def test_every_place_is_used(resources: Resources) -> None:
    """A run that has been started counts once: in the executor, and no longer among those of its attempt."""
    executor = TwoPlaces("hang", "hang")
    async with working(resources, executor):
        await accept(resources)
        await wait_until(lambda: len(executor.progress()) == 1)
        await accept(resources)
        await wait_until(lambda: len(executor.progress()) == 2)


class StubbornExecutor(ScriptedExecutor):
    """Its `start` does not end when it is canceled, before `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.is_starting = False

    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        self.is_starting = True
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue


async def test_a_drain_ends_in_time_whatever_an_attempt_does(resources: Resources) -> None:
    executor = StubbornExecutor()
    job_id = await accept(resources)
    worker = Worker(resources.for_workers, executor, name="stubborn", timing=QUICK)
    worker.start()
    await wait_until(lambda: executor.is_starting)
    await asyncio.wait_for(worker.drain(timedelta(seconds=0.2)), 30)
    assert (await job_of(resources, job_id)).state is JobState.RUNNING, (
        "its lease runs out, and another worker takes it"
    )
    executor.released.set()
