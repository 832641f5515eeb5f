"""Redis is killed, paused, full, read-only or empty: acknowledged jobs stay, others are refused."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import NoScriptError

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import CommitReply, JobKind, JobState
from serve_app.jobs.queue import JobQueue, new_nonce
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.redis_client import connect
from tests.faults.environment import LONG, Environment, open_environment
from tests.faults.worker import FORKED_WORKERS, WorkerBehavior
from tests.rewriting import replacing
from tests.support import memory_limit, wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]

CANCELED = [JobState.CANCELED]
ACCEPTS = int(os.environ.get("SOAK_ACCEPTS", "100000"))


async def _insist(env: Environment, number: int) -> None:
    """What a caller does who wants one job: ask under one key until there is an answer."""
    while True:
        try:
            await env.ask(seed=number, key=f"key-{number}", may_end_as=CANCELED, account=f"acct_{number % 5}")
            return
        except StoreUnavailable:
            await env.start_redis()


async def _accept_under_kills(env: Environment, *, jobs: int, callers: int, kills: int) -> None:
    numbers: Iterator[int] = iter(range(jobs))

    async def call() -> None:
        for number in numbers:
            await _insist(env, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(call())
        for n in range(1, kills + 1):
            wanted = jobs * n // (kills + 1)
            await wait_until(lambda wanted=wanted: len(env.acknowledged.all) >= wanted, timeout=1800)
            env.kill_redis()
            sys.stdout.write(f"\r{wanted} of {jobs} accepted, {n} kills   ")


async def test_a_killed_redis_keeps_all_it_acknowledged(env: Environment) -> None:
    await _accept_under_kills(env, jobs=300, callers=8, kills=3)
    await env.cancels_well()
    assert len(set(env.acknowledged.all)) == 300


async def test_without_its_file_the_auditor_finds_what_redis_forgot(env: Environment) -> None:
    await env.accept(may_end_as=CANCELED)
    with env.redis() as client:
        client.config_set("appendonly", "no")
    await env.accept(may_end_as=CANCELED)
    await env.crash_redis()
    await env.cancel_all()
    assert any("there is no record of it" in problem for problem in await env.audit())


@pytest.mark.soak
async def test_jobs_outlive_a_redis_killed_while_they_are_drawn(env: Environment) -> None:
    for seed in range(3):
        await env.accept(seed=seed, steps=20)
    env.worker(WorkerBehavior(reaps=True))
    for _ in range(3):
        await env.accept(steps=4)
        await env.crash_redis()
    await env.ends_well()


async def test_a_paused_redis_is_refused_in_time_and_nothing_is_half_done(env: Environment) -> None:
    job_id = await env.accept(may_end_as=CANCELED)
    pid = ensure_redis(env.settings.data_dir).pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable):
            await env.ask(key="later")
        took = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    assert took < 15, "a partition must turn into an error soon: in three seconds, on a machine that is not crowded"
    again = await env.accept(key="later", may_end_as=CANCELED)  # the pause may have let the first call in
    assert again != job_id
    await env.cancels_well()


@pytest.mark.soak
async def test_a_full_redis_takes_nothing_in_and_lets_running_jobs_end(tmp_path: Path) -> None:
    async with open_environment(tmp_path, max_attempts=1) as env:
        job_id = await env.accept(steps=LONG)
        env.worker(WorkerBehavior(reaps=True))
        await env.until_running(job_id)
        with env.redis() as client, memory_limit(client):
            with pytest.raises(StoreUnavailable):
                await env.ask()
            await env.until_ended()
        assert not await env.audit()


async def test_heartbeats_that_need_memory_would_lose_the_job_on_a_full_redis(env: Environment) -> None:
    without_the_freeing_write = replacing("jobs/heartbeat", "  call_also_when_full(", "  redis.call(")
    await env.accept(may_end_as=CANCELED)
    tampered = JobQueue(connect(env.redis_url), env.settings, rewrite=without_the_freeing_write)
    (claim,) = await tampered.claim("w", pool=JobKind.GENERATION, nonce=new_nonce())
    with env.redis() as client, memory_limit(client):
        await env.resources.queue.heartbeat(claim.lease, progress=1)
        with pytest.raises(StoreUnavailable):
            await tampered.heartbeat(claim.lease, progress=2)


@pytest.mark.soak
async def test_a_read_only_redis_accepts_nothing_until_it_is_primary_again(env: Environment) -> None:
    await env.accept()
    env.worker(WorkerBehavior(reaps=True))
    with env.redis() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for seed in range(5):
            with pytest.raises(StoreUnavailable):
                await env.ask(seed=seed)
        client.execute_command("REPLICAOF", "NO", "ONE")
    await env.accept(seed=9)
    await env.ends_well()
    assert len(env.acknowledged.all) == 2


@pytest.mark.soak
async def test_both_versions_of_the_scripts_work_side_by_side_and_are_taught_again(env: Environment) -> None:
    """As during a rolling update: every call of the next version has another digest. The server forgets both."""
    following = JobQueue(connect(env.redis_url), env.settings, rewrite=lambda _, text: f"{text}\n-- the next version")
    env.worker(WorkerBehavior(reaps=True))
    with env.redis() as client:
        for seed in range(8):
            client.script_flush()
            await env.accept(seed=seed, queue=(env.resources.queue, following)[seed % 2])
        client.script_flush()
        with pytest.raises(NoScriptError):
            client.evalsha("0" * 40, 0)
    claims = await following.claim("next", pool=JobKind.GENERATION, nonce=new_nonce(), limit=2)
    for claim in claims:
        await following.heartbeat(claim.lease, progress=5)
        assert await env.resources.queue.release(claim.lease) is CommitReply.REQUEUED
    await env.ends_well()


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_many_accepts_survive_forty_kills(tmp_path: Path) -> None:
    """The accept path at its full rate, then every job's end, with the server killed all along."""
    limits = {"max_queued": 200_000, "max_queued_per_account": 200_000}
    async with open_environment(tmp_path, **limits) as env:
        began = time.monotonic()
        await _accept_under_kills(env, jobs=ACCEPTS, callers=32, kills=20)
        accepted_s = time.monotonic() - began
        await _end_under_kills(env, kills=20)
        problems = await env.audit()
        print(  # noqa: T201 - the report of a soak run
            f"\n{len(env.acknowledged.all)} accepted in {accepted_s:.0f} s under 20 kills, all ended under 20 more; "
            f"problems: {problems}"
        )
        assert len(set(env.acknowledged.all)) == ACCEPTS
        assert not problems


async def _end_under_kills(env: Environment, *, kills: int) -> None:
    """Every job canceled, which ends it."""
    total = len(env.acknowledged.all)
    done = 0

    async def cancel(ids: list[str]) -> None:
        nonlocal done
        for job_id in ids:
            await _insist_on_cancel(env, job_id)
            done += 1

    async with asyncio.TaskGroup() as group:
        for part in range(32):
            group.create_task(cancel(env.acknowledged.all[part::32]))
        for n in range(1, kills + 1):
            wanted = total * n // (kills + 1)
            await wait_until(lambda wanted=wanted: done >= wanted, timeout=1800)
            env.kill_redis()


async def _insist_on_cancel(env: Environment, job_id: str) -> None:
    while True:
        try:
            await env.resources.queue.cancel(job_id, account_id=None)
            return
        except StoreUnavailable:
            await env.start_redis()
