"""Workers that die, freeze, hang or leave: every accepted job still ends once, with its own images."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import pytest

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import JobState
from serve_app.operations.housekeeping import reap_forever
from serve_app.store.keys import redis_key
from serve_app.worker.attempt import WorkerTiming
from tests.faults.environment import ACCOUNT, ENDLESS, HASTY, LONG, Environment, open_environment
from tests.faults.worker import FORKED_WORKERS, POISON, QUICK, UNHEALTHY, Point, WorkerBehavior
from tests.support import adapter_id, existing, wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]

soak = pytest.mark.soak
KILLS = 20
JOBS_OF_BOTH = 12
"""More than two workers run at once."""
WITHIN_S = 2.0
"""From a change of a LoRA until it holds everywhere, on a quiet machine (benchmarks/RESULTS.md)."""
POINTS = [
    pytest.param("claimed", 2, marks=soak),
    ("denoising", 2),
    pytest.param("half stored", 2, marks=soak),
    pytest.param("stored", 2, marks=soak),
    pytest.param("finished", 1, marks=soak),
]
"""Where the worker dies, and the attempt that counts."""


@pytest.mark.parametrize(("point", "attempt"), POINTS)
async def test_a_killed_workers_job_is_finished_by_another(env: Environment, point: Point, attempt: int) -> None:
    job_id = await env.accept(steps=8)
    killed = env.worker(WorkerBehavior(die=point), lease=HASTY)
    await wait_until(lambda: killed.exitcode == -signal.SIGKILL, timeout=60)
    env.worker()
    await env.ends_well()
    job = await env.job(job_id)
    assert job.attempt == attempt
    with env.redis() as client:
        [counters] = client.scan_iter(redis_key("usage", job.account_id, "*"))
        [(images, _)] = client.hscan_iter(counters, "images:*")
        client.hincrby(counters, images, 1)
    assert any("usage" in problem for problem in await env.audit()), "an image counted twice would be found"


@pytest.mark.soak
async def test_a_dead_workers_job_is_taken_within_its_lease_and_two_seconds(env: Environment) -> None:
    """At the shipped timing of workers and reaper.

    Prints the median and the longest time from the kill to the next attempt.
    """
    limit_s = HASTY.total_seconds() + 2
    behavior = WorkerBehavior(timing=WorkerTiming())
    took: list[float] = []
    async with asyncio.TaskGroup() as group:
        reaping = group.create_task(reap_forever(env.resources.for_housekeeping))
        heir = env.worker(behavior, lease=HASTY)
        for _ in range(KILLS):
            job_id, busy = await env.accept(steps=ENDLESS, may_end_as=[JobState.CANCELED]), heir
            await env.until_running(job_id)
            heir = env.worker(behavior, lease=HASTY)
            busy.kill()
            killed_at = time.monotonic()
            await wait_until(lambda job_id=job_id: _is_second_attempt(env, job_id), timeout=60)
            took.append(time.monotonic() - killed_at)
            await env.cancel_all()
            await env.until_ended()
        reaping.cancel()
    sys.stdout.write(
        f"\n{KILLS} kills, lease {HASTY.total_seconds()} s: {median(took):.2f} s, at most {max(took):.2f} s\n"
    )
    assert max(took) <= limit_s
    assert not await env.audit()


async def _is_second_attempt(env: Environment, job_id: str) -> bool:
    job = await env.job(job_id)
    return job.state is JobState.RUNNING and job.attempt == 2


async def test_a_lora_serves_on_every_worker_when_added_and_stops_everywhere_when_revoked_or_deleted(
    env: Environment,
) -> None:
    """At the shipped timing of workers and reaper; each LoRA has more jobs than both workers take.

    Prints how long each took.
    """
    workers = {env.worker(WorkerBehavior(timing=WorkerTiming())).name for _ in range(2)}
    first = [await env.accept(steps=LONG, may_end_as=[JobState.CANCELED]) for _ in range(JOBS_OF_BOTH)]
    await _until_all_run(env, first, workers)
    await env.cancel_all()
    outline = existing(await env.resources.catalog.adapter(adapter_id("outline")))
    took: dict[str, float] = {}
    async with asyncio.TaskGroup() as group:
        reaping = group.create_task(reap_forever(env.resources.for_housekeeping))
        for how in ("revoked", "deleted"):
            lora = replace(outline, id=f"model_{how}", accounts=frozenset({ACCOUNT}))
            await env.resources.adapter_registry.register(lora)
            began = time.monotonic()
            asked = [
                await env.accept(steps=ENDLESS, adapter_id=lora.id, may_end_as=[JobState.FAILED])
                for _ in range(JOBS_OF_BOTH)
            ]
            await _until_all_run(env, asked, workers, progress=0)
            took["added"] = max(took.get("added", 0), time.monotonic() - began)
            await _until_all_run(env, asked, workers)
            began = time.monotonic()
            if how == "revoked":
                await env.resources.adapter_grants.revoke(lora.id, ACCOUNT)
            else:
                await env.resources.adapter_registry.remove(lora.id)
            await wait_until(lambda asked=asked: _are_unavailable(env, asked))
            took[how] = time.monotonic() - began
        reaping.cancel()
    sys.stdout.write("".join(f"\n{what}: {seconds:.2f} s" for what, seconds in took.items()) + "\n")
    assert max(took.values()) <= 5 * WITHIN_S
    assert not await env.audit()


async def _until_all_run(
    env: Environment, job_ids: Sequence[str], workers: Collection[str], *, progress: int = 1
) -> None:
    """Until each of the workers has claimed one of the jobs, and come so far with it."""
    with env.redis() as client:

        def running() -> set[str]:
            rows = [client.hmget(redis_key("job", job_id), "worker", "progress") for job_id in job_ids]
            return {worker for worker, shown in rows if worker and int(shown or 0) >= progress}

        await wait_until(lambda: running() == set(workers), timeout=60)


async def _are_unavailable(env: Environment, job_ids: Sequence[str]) -> bool:
    jobs = await env.resources.jobs.find_many(job_ids)
    codes = {job.failure.code if job.failure else None for job in jobs.values()}
    return codes == {FailureCode.LORA_UNAVAILABLE}


async def _frozen_past_its_lease(env: Environment, behavior: WorkerBehavior) -> BaseProcess:
    """A worker that sleeps through the loss of its lease and wakes up when another has committed the job."""
    job_id = await env.accept(steps=LONG)
    zombie = env.worker(behavior, lease=HASTY)
    await env.until_running(job_id)
    assert zombie.pid is not None
    os.kill(zombie.pid, signal.SIGSTOP)
    env.worker(behavior)
    await env.until_ended()
    assert len(env.images) == 1
    os.kill(zombie.pid, signal.SIGCONT)
    return zombie


async def test_a_frozen_worker_wakes_up_fenced(env: Environment) -> None:
    zombie = await _frozen_past_its_lease(env, WorkerBehavior())
    await env.until_counted("fenced")
    zombie.terminate()
    await wait_until(lambda: zombie.exitcode == 0, timeout=60)
    assert len(env.images) == 1, "it left no object of its own, before any sweep"
    assert not await env.audit()


@pytest.mark.soak
async def test_without_fences_the_auditor_finds_the_zombie(env: Environment) -> None:
    await _frozen_past_its_lease(env, WorkerBehavior(is_fenced=False))

    async def is_found() -> bool:
        return bool(await env.audit())

    await wait_until(is_found, timeout=60)


@pytest.mark.soak
async def test_a_hung_step_loses_its_job_and_its_process(env: Environment) -> None:
    strict = replace(QUICK, step_limit=timedelta(seconds=0.5))
    job_id = await env.accept()
    hung = env.worker(WorkerBehavior(hangs=True, timing=strict), lease=HASTY)
    await wait_until(lambda: hung.exitcode == UNHEALTHY, timeout=60)
    env.worker()
    await env.ends_well()
    assert (await env.job(job_id)).attempt == 2


@pytest.mark.soak
async def test_without_a_watchdog_the_auditor_finds_the_hung_job(env: Environment) -> None:
    job_id = await env.accept()
    env.worker(WorkerBehavior(hangs=True), lease=HASTY)
    await env.until(job_id, JobState.RUNNING)
    env.worker()
    with pytest.raises(TimeoutError):
        await env.until_ended(timeout=3 * HASTY.total_seconds())
    assert any("still running" in problem for problem in await env.audit())


@pytest.mark.soak
@pytest.mark.parametrize("sent", [True, False])
async def test_heartbeats_keep_a_job_that_takes_longer_than_its_lease(tmp_path: Path, sent: bool) -> None:
    """Without them the auditor finds the lost job."""
    async with open_environment(tmp_path, lease=HASTY, max_attempts=1) as env:
        await env.accept(steps=ENDLESS)
        env.worker(WorkerBehavior(heartbeats=sent, reaps=True))
        await env.until_ended()
        found = await env.audit()
    assert not found if sent else any("ended failed" in problem for problem in found)


async def _until_dead(env: Environment, poison: str) -> None:
    """Every worker it kills is replaced, as Serve does."""
    worker = env.worker(WorkerBehavior(reaps=True))

    async def is_over() -> bool:
        nonlocal worker
        if worker.exitcode is not None:
            worker = env.worker(WorkerBehavior(reaps=True))
        return (await env.job(poison)).state.is_terminal

    await wait_until(is_over, timeout=60)
    await env.ends_well()
    assert [job.id for job in await env.resources.dead_letters.list()] == [poison]


@pytest.mark.soak
async def test_a_job_that_kills_its_workers_is_a_dead_letter_and_those_beside_it_end_well(tmp_path: Path) -> None:
    async with open_environment(tmp_path, lease=HASTY, max_attempts=3) as env:
        poison = await env.accept(prompt=f"a cup of {POISON}", may_end_as=[JobState.FAILED])
        for seed in range(3):
            await env.accept(seed=seed, account=f"acct_{seed}")
        await _until_dead(env, poison)
        for seed in range(3):
            await env.accept(seed=seed)
        await env.ends_well()


@pytest.mark.soak
async def test_a_worker_that_is_stopped_releases_its_job_at_once(tmp_path: Path) -> None:
    async with open_environment(tmp_path, lease=timedelta(seconds=60), max_attempts=1) as env:
        job_id = await env.accept(steps=ENDLESS)
        leaving = env.worker(WorkerBehavior(drain_s=2.2))
        await env.until_running(job_id)
        leaving.terminate()
        await env.until(job_id, JobState.QUEUED)
        await env.resources.queue.cancel(job_id, account_id=None)
        env.acknowledged.may_end_as[job_id] = frozenset({JobState.CANCELED})
        await wait_until(lambda: leaving.exitcode == 0, timeout=30)
        assert not env.images
        assert not await env.audit()


@pytest.mark.soak
async def test_jobs_wait_for_a_reaper_that_was_away(env: Environment) -> None:
    """Meanwhile the auditor finds the job of the killed worker."""
    for seed in range(3):
        await env.accept(seed=seed)
    killed = env.worker(WorkerBehavior(die="denoising"), lease=HASTY)
    await wait_until(lambda: killed.exitcode == -signal.SIGKILL, timeout=60)
    assert any("still running" in problem for problem in await env.audit())
    env.worker(WorkerBehavior(reaps=True))  # any process may reap; this one also draws
    await env.ends_well()


async def test_a_worker_whose_log_disk_is_full_completes_its_jobs(env: Environment) -> None:
    await env.accept()
    await env.accept(lora="no-such", may_end_as=[JobState.FAILED])
    env.worker(WorkerBehavior(is_log_full=True))
    await env.ends_well()


@pytest.mark.soak
async def test_a_storm_of_cancels_ends_every_job_once(env: Environment) -> None:
    either = (JobState.CANCELED, JobState.COMPLETED)
    ids = [await env.accept(seed=seed, steps=10, account=f"acct_{seed % 3}", may_end_as=either) for seed in range(24)]
    env.worker()
    await env.until_running(ids[0])
    for job_id in ids + ids[::-1]:
        await env.resources.queue.cancel(job_id, account_id=None)
    await env.ends_well()
    assert len(env.images) == sum([(await env.job(job_id)).state is JobState.COMPLETED for job_id in ids])
