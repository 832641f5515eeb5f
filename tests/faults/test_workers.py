"""Workers that die, freeze, hang or leave: every accepted job still ends once, with its own images."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import pytest

from serve_app.domain.jobs import JobState
from serve_app.service.attempt import Pace
from serve_app.service.reap import reap_forever
from tests.faults.scene import ENDLESS, HASTY, LONG, Scene, open_scene
from tests.faults.worker import POISON, QUICK, UNHEALTHY, Orders, Point
from tests.support import wait_until

pytestmark = pytest.mark.timeout(300)

soak = pytest.mark.soak
KILLS = 20
POINTS = [
    pytest.param("claimed", 2, marks=soak),
    ("denoising", 2),
    pytest.param("half stored", 2, marks=soak),
    pytest.param("stored", 2, marks=soak),
    pytest.param("finished", 1, marks=soak),
]
"""Where the worker dies, and the attempt that counts."""


@pytest.mark.parametrize(("point", "attempt"), POINTS)
async def test_a_killed_workers_job_is_finished_by_another(scene: Scene, point: Point, attempt: int) -> None:
    job_id = await scene.accept(steps=8)
    killed = scene.worker(Orders(die=point), lease=HASTY)
    await wait_until(lambda: killed.exitcode == -signal.SIGKILL, timeout=60)
    scene.worker()
    await scene.until_ended()
    assert not await scene.audit()
    assert (await scene.job(job_id)).attempt == attempt


@pytest.mark.soak
async def test_a_dead_workers_job_is_taken_within_its_lease_and_two_seconds(scene: Scene) -> None:
    """At the shipped pace of workers and reaper. Prints the median and the longest time from the kill to the next attempt."""
    limit_s = HASTY.total_seconds() + 2
    orders = Orders(pace=Pace())
    took: list[float] = []
    async with asyncio.TaskGroup() as group:
        reaping = group.create_task(reap_forever(scene.resources))
        heir = scene.worker(orders, lease=HASTY)
        for _ in range(KILLS):
            job_id, busy = await scene.accept(steps=ENDLESS, may_end_as=[JobState.CANCELED]), heir
            await scene.until_running(job_id)
            heir = scene.worker(orders, lease=HASTY)
            busy.kill()
            killed_at = time.monotonic()
            await wait_until(lambda job_id=job_id: _is_second_attempt(scene, job_id), timeout=60)
            took.append(time.monotonic() - killed_at)
            await scene.cancel_all()
            await scene.until_ended()
        reaping.cancel()
    sys.stdout.write(
        f"\n{KILLS} kills, lease {HASTY.total_seconds()} s: {median(took):.2f} s, at most {max(took):.2f} s\n"
    )
    assert max(took) <= limit_s
    assert not await scene.audit()


async def _is_second_attempt(scene: Scene, job_id: str) -> bool:
    job = await scene.job(job_id)
    return job.state is JobState.RUNNING and job.attempt == 2


@pytest.mark.soak
async def test_without_a_reaper_the_auditor_finds_the_killed_workers_job(scene: Scene) -> None:
    await scene.accept()
    killed = scene.worker(Orders(die="denoising"))
    await wait_until(lambda: killed.exitcode == -signal.SIGKILL, timeout=60)
    assert any("still running" in problem for problem in await scene.audit())


async def _frozen_past_its_lease(scene: Scene, orders: Orders) -> BaseProcess:
    """A worker that sleeps through the loss of its lease and wakes up when another has committed the job."""
    job_id = await scene.accept(steps=LONG)
    zombie = scene.worker(orders, lease=HASTY)
    await scene.until_running(job_id)
    assert zombie.pid is not None
    os.kill(zombie.pid, signal.SIGSTOP)
    scene.worker(orders)
    await scene.until_ended()
    assert len(scene.images) == 1
    os.kill(zombie.pid, signal.SIGCONT)
    return zombie


async def test_a_frozen_worker_wakes_up_fenced(scene: Scene) -> None:
    zombie = await _frozen_past_its_lease(scene, Orders())

    async def was_fenced() -> bool:
        return (await scene.resources.jobs.counts()).get("fenced", 0) > 0

    await wait_until(was_fenced, timeout=60)
    zombie.terminate()
    await wait_until(lambda: zombie.exitcode == 0, timeout=60)
    assert len(scene.images) == 1, "it left no object of its own, before any sweep"
    assert not await scene.audit()


@pytest.mark.soak
async def test_without_fences_the_auditor_finds_the_zombie(scene: Scene) -> None:
    await _frozen_past_its_lease(scene, Orders(is_fenced=False))

    async def is_found() -> bool:
        return bool(await scene.audit())

    await wait_until(is_found, timeout=60)


@pytest.mark.soak
async def test_a_hung_step_loses_its_job_and_its_process(scene: Scene) -> None:
    strict = replace(QUICK, step_limit=timedelta(seconds=0.5))
    job_id = await scene.accept()
    hung = scene.worker(Orders(hangs=True, pace=strict), lease=HASTY)
    await wait_until(lambda: hung.exitcode == UNHEALTHY, timeout=60)
    scene.worker()
    await scene.until_ended()
    assert not await scene.audit()
    assert (await scene.job(job_id)).attempt == 2


@pytest.mark.soak
async def test_without_a_watchdog_the_auditor_finds_the_hung_job(scene: Scene) -> None:
    job_id = await scene.accept()
    scene.worker(Orders(hangs=True), lease=HASTY)
    await scene.until(job_id, JobState.RUNNING)
    scene.worker()
    with pytest.raises(TimeoutError):
        await scene.until_ended(timeout=3 * HASTY.total_seconds())
    assert any("still running" in problem for problem in await scene.audit())


@pytest.mark.soak
async def test_beats_keep_a_job_that_takes_longer_than_its_lease(tmp_path: Path) -> None:
    async with open_scene(tmp_path, lease=HASTY, max_attempts=1) as scene:
        await scene.accept(steps=ENDLESS)
        scene.worker(Orders(reaps=True))
        await scene.until_ended()
        assert not await scene.audit()


@pytest.mark.soak
async def test_without_beats_the_auditor_finds_the_lost_job(tmp_path: Path) -> None:
    async with open_scene(tmp_path, lease=HASTY, max_attempts=1) as scene:
        await scene.accept(steps=ENDLESS)
        scene.worker(Orders(beats=False, reaps=True))
        await scene.until_ended()
        assert any("ended failed" in problem for problem in await scene.audit())


async def _until_dead(scene: Scene, poison: str) -> None:
    """Every worker it kills is replaced, as Serve does."""
    worker = scene.worker(Orders(reaps=True))

    async def is_over() -> bool:
        nonlocal worker
        if worker.exitcode is not None:
            worker = scene.worker(Orders(reaps=True))
        return (await scene.job(poison)).state.is_terminal

    await wait_until(is_over, timeout=60)
    await scene.until_ended()
    assert not await scene.audit()
    assert [job.id for job in await scene.resources.jobs.dead()] == [poison]


@pytest.mark.soak
async def test_a_job_that_kills_its_workers_becomes_a_dead_letter(tmp_path: Path) -> None:
    async with open_scene(tmp_path, lease=HASTY, max_attempts=2) as scene:
        poison = await scene.accept(prompt=f"a cup of {POISON}", may_end_as=[JobState.FAILED])
        await _until_dead(scene, poison)
        for seed in range(3):
            await scene.accept(seed=seed)
        await scene.until_ended()
        assert not await scene.audit()


@pytest.mark.soak
async def test_jobs_drawn_beside_one_that_kills_its_workers_are_completed(tmp_path: Path) -> None:
    async with open_scene(tmp_path, lease=HASTY, max_attempts=3) as scene:
        poison = await scene.accept(prompt=f"a cup of {POISON}", may_end_as=[JobState.FAILED])
        for seed in range(3):
            await scene.accept(seed=seed, account=f"acct_{seed}")
        await _until_dead(scene, poison)


@pytest.mark.soak
async def test_a_worker_told_to_stop_hands_its_job_back_at_once(tmp_path: Path) -> None:
    async with open_scene(tmp_path, lease=timedelta(seconds=60), max_attempts=1) as scene:
        job_id = await scene.accept(steps=ENDLESS)
        leaving = scene.worker(Orders(drain_s=2.2))
        await scene.until_running(job_id)
        leaving.terminate()
        await scene.until(job_id, JobState.QUEUED)
        await scene.resources.jobs.cancel(job_id, account_id=None)
        scene.ledger.may_end_as[job_id] = frozenset({JobState.CANCELED})
        await wait_until(lambda: leaving.exitcode == 0, timeout=30)
        assert not scene.images
        assert not await scene.audit()


@pytest.mark.soak
async def test_jobs_wait_for_a_reaper_that_was_away(scene: Scene) -> None:
    for seed in range(3):
        await scene.accept(seed=seed)
    killed = scene.worker(Orders(die="denoising"), lease=HASTY)
    await wait_until(lambda: killed.exitcode == -signal.SIGKILL, timeout=60)
    scene.worker(Orders(reaps=True))  # any process may reap; this one also draws
    await scene.until_ended()
    assert not await scene.audit()


async def test_a_worker_whose_log_disk_is_full_completes_its_jobs(scene: Scene) -> None:
    await scene.accept()
    await scene.accept(lora="no-such", may_end_as=[JobState.FAILED])
    scene.worker(Orders(is_log_full=True))
    await scene.until_ended()
    assert not await scene.audit()


@pytest.mark.soak
async def test_a_storm_of_cancels_ends_every_job_once(scene: Scene) -> None:
    either = (JobState.CANCELED, JobState.COMPLETED)
    ids = [await scene.accept(seed=seed, steps=10, account=f"acct_{seed % 3}", may_end_as=either) for seed in range(24)]
    scene.worker()
    await scene.until_running(ids[0])
    for job_id in ids + ids[::-1]:
        await scene.resources.jobs.cancel(job_id, account_id=None)
    await scene.until_ended()
    assert not await scene.audit()
    assert len(scene.images) == sum([(await scene.job(job_id)).state is JobState.COMPLETED for job_id in ids])
