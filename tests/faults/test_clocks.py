"""Ingress and worker clocks are an hour off, and nothing expires or is taken over too early.

Redis has the true time.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from serve_app.accounts.sessions import Holder
from serve_app.domain.jobs import CommitReply, HeartbeatReply, JobKind, JobState, Lease
from serve_app.domain.requests import Variant
from serve_app.jobs.queue import JobQueue, new_nonce
from serve_app.store.redis_client import connect
from tests.api.app import ALL, BODY_A, BODY_B
from tests.faults.clock import by_the_callers_clock, clock_off_by
from tests.faults.environment import Environment, Ingress, open_environment, open_ingress
from tests.faults.worker import FORKED_WORKERS, WorkerBehavior

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]

AHEAD, BEHIND = timedelta(hours=1), timedelta(hours=-1)
HALF_AN_HOUR = timedelta(minutes=30)
CLOSE = timedelta(minutes=5)
"""What a crowded test machine may lose between two readings; far from an hour."""


def _true_time(env: Environment) -> datetime:
    with env.redis() as client:
        seconds, _ = client.time()
    return datetime.fromtimestamp(seconds, UTC)


@pytest.fixture
async def ingress(env: Environment, tmp_path: Path) -> AsyncIterator[Ingress]:
    """Its clock is the test's own."""
    settings = env.settings.model_copy(update={"redis_url": env.redis_url})
    async with open_ingress(env, tmp_path, settings) as opened:
        yield opened


@pytest.mark.parametrize("error", [AHEAD, BEHIND], ids=["ahead", "behind"])
async def test_a_job_goes_from_an_ingress_to_a_worker_with_opposite_errors(
    env: Environment, ingress: Ingress, error: timedelta
) -> None:
    began = _true_time(env)
    with clock_off_by(error):
        run = await ingress.post(BODY_B | {"width": 256, "height": 256}, ingress.member.b)
        asked = await ingress.post(BODY_A, ingress.member.a, may_end_as=[JobState.CANCELED])
        await ingress.client.post(f"/v1/jobs/{asked.json()['request_id']}/cancel", headers=ingress.member.a)
        assert timedelta(seconds=run.json()["estimated_time"]) < CLOSE
        assert int(run.headers["RateLimit"].rpartition("t=")[2]) <= 3600
        env.worker(WorkerBehavior(clock_error=-error, reaps=True))
        await env.until_ended()
        image = (await ingress.client.get(f"/v1/generations/{run.json()['run_id']}", headers=ingress.member.b)).json()
        assert (await ingress.client.get(image["image_url"])).content.startswith(b"\x89PNG")
        assert not await env.audit()
    promised = datetime.fromisoformat(asked.json()["estimated_completion_time"])
    ended = _true_time(env)
    assert abs(promised - began) < CLOSE
    for job_id in env.acknowledged.all:
        job = await env.job(job_id)
        assert job.finished_at is not None
        assert began <= job.created_at + timedelta(seconds=1)
        assert job.created_at <= (job.started_at or job.created_at) <= job.finished_at <= ended + timedelta(seconds=1)


async def test_an_address_signed_by_a_slow_clock_opens_by_a_fast_one(ingress: Ingress, env: Environment) -> None:
    run_id = (await ingress.post(BODY_B | {"width": 256, "height": 256}, ingress.member.b)).json()["run_id"]
    env.worker(WorkerBehavior(reaps=True))
    await env.until_ended()
    for signing, checking in ((BEHIND, AHEAD), (AHEAD, BEHIND)):
        with clock_off_by(signing):
            image = (await ingress.client.get(f"/v1/generations/{run_id}", headers=ingress.member.b)).json()
        with clock_off_by(checking):
            assert (await ingress.client.get(image["image_url"])).is_success


@pytest.fixture
async def strict(tmp_path: Path) -> AsyncIterator[Environment]:
    """A env where half an hour too much would end everything."""
    async with open_environment(tmp_path, max_attempts=1, queue_age_limit=HALF_AN_HOUR, lease=HALF_AN_HOUR) as env:
        yield env


async def _one_waits_one_runs(env: Environment) -> Lease:
    for seed in range(2):
        await env.accept(seed=seed, may_end_as=[JobState.CANCELED])
    (claim,) = await env.resources.queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce())
    return claim.lease


async def test_a_reaper_with_a_fast_clock_steals_nothing_and_ends_nothing(strict: Environment) -> None:
    queue = strict.resources.queue
    with clock_off_by(BEHIND):
        lease = await _one_waits_one_runs(strict)
    with clock_off_by(AHEAD):
        assert await queue.reap() == 0
    assert await queue.heartbeat(lease, progress=1) is HeartbeatReply.OK
    assert await queue.release(lease) is CommitReply.REQUEUED
    await strict.cancels_well()


async def test_the_auditor_finds_what_a_script_by_its_callers_clock_would_end(strict: Environment) -> None:
    await _one_waits_one_runs(strict)
    wrong = JobQueue(connect(strict.redis_url), strict.settings, rewrite=by_the_callers_clock(AHEAD))
    assert await wrong.reap() == 3, "the job that runs, the one that waits, and the worker"
    problems = await strict.audit()
    assert any("ended failed" in problem for problem in problems)
    assert any("ended expired" in problem for problem in problems)


async def test_sessions_keys_and_repeats_do_not_end_early(env: Environment) -> None:
    resources, sessions = env.resources, env.resources.sessions
    with clock_off_by(BEHIND):
        account = await resources.accounts.create("acme")
        _, secret = await resources.api_keys.create(account.id, interfaces=ALL, expires_in=HALF_AN_HOUR)
        token = await sessions.create(account.id)
        first = await env.accept(key="once", may_end_as=[JobState.CANCELED])
    with clock_off_by(AHEAD):
        assert (await resources.auth.authenticate(secret, Variant.A, counted=True)).caller is not None
        assert await sessions.get(token) == Holder(account.id, "", "0.0")
        assert await env.accept(key="once", may_end_as=[JobState.CANCELED]) == first
