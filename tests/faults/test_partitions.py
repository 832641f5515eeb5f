"""A connection to Redis that is cut, slow, or loses one reply: for workers, and for the ingress."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import CommitReply, Failure, JobKind, JobState
from serve_app.jobs.queue import JobQueue, new_nonce
from serve_app.settings import Settings
from serve_app.store.redis_client import connect
from serve_app.store.script import Rewrite
from tests.api.app import BODY_B
from tests.faults.environment import HASTY, LONG, Environment, Ingress, open_ingress
from tests.faults.redis_proxy import RedisProxy, proxy_to
from tests.faults.worker import FORKED_WORKERS, WorkerBehavior
from tests.rewriting import replacing
from tests.support import store_image, wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]

REFUSED_WITHIN_S = 15.0
"""One call's limit of three seconds, and what a crowded test machine adds."""


@pytest.fixture
async def proxy(env: Environment) -> AsyncIterator[RedisProxy]:
    async with proxy_to(env.redis_url) as opened:
        yield opened


def _through(env: Environment, proxy: RedisProxy) -> Settings:
    """The env's settings, with Redis at the other end of the proxy."""
    fields = {name: getattr(env.settings, name) for name in env.settings.model_fields_set}
    return Settings.model_validate({**fields, "redis_url": proxy.url})


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
async def test_a_worker_cut_off_past_its_lease_leaves_the_job_to_another(
    env: Environment, proxy: RedisProxy, fault: str
) -> None:
    job_id = await env.accept(steps=LONG)
    env.worker(settings=_through(env, proxy), lease=HASTY)
    await env.until_running(job_id)
    getattr(proxy, fault)()
    env.worker()
    await env.until_ended()
    assert (await env.job(job_id)).attempt == 2
    proxy.heal()
    await wait_until(lambda: len(env.images) <= 1, timeout=60)  # the one that came back deletes what it had stored
    for process in env.processes:
        process.terminate()
    await wait_until(lambda: all(process.exitcode == 0 for process in env.processes), timeout=60)
    assert len(env.images) == 1
    assert not await env.audit()


@pytest.mark.soak
async def test_a_short_cut_costs_no_attempt(env: Environment, proxy: RedisProxy) -> None:
    job_id = await env.accept(steps=LONG)
    env.worker(settings=_through(env, proxy))
    await env.until_running(job_id)
    proxy.refuse()
    proxy.heal()
    await env.ends_well()
    assert (await env.job(job_id)).attempt == 1


MOVES = ("accept", "claim", "heartbeat", "finish", "fail", "release", "cancel", "reap")


@pytest.mark.parametrize("move", MOVES)
async def test_a_lost_reply_changes_nothing(env: Environment, proxy: RedisProxy, move: str) -> None:
    await _one_life(env, proxy, lost=move)
    assert proxy.lost_replies == 1
    assert not await env.audit()


FORGETS_ITS_OWN_FINISH = replacing("jobs/finish", "{completed = 'duplicate'}", "{}")
ACCEPTS_TWICE = replacing("jobs/accept", "if redis.call('EXISTS', K('job:' .. new.id)) == 1", "if false")


@pytest.mark.script_text
@pytest.mark.parametrize(("move", "rewrite"), [("finish", FORGETS_ITS_OWN_FINISH), ("accept", ACCEPTS_TWICE)])
async def test_the_auditor_finds_a_lost_reply_that_did_harm(
    env: Environment, proxy: RedisProxy, move: str, rewrite: Rewrite
) -> None:
    await _one_life(env, proxy, lost=move, rewrite=rewrite)
    assert await env.audit()


async def _one_life(env: Environment, proxy: RedisProxy, *, lost: str, rewrite: Rewrite | None = None) -> None:
    """Move a job through every move over the proxy, which loses the reply to one of them.

    The client asks again by itself.
    """
    queue = JobQueue(connect(proxy.url), env.settings, rewrite=rewrite)
    digest = _load_script(env, queue, lost)

    async def through_proxy(move: str, call: Any) -> Any:
        if move == lost:
            proxy.lose_reply_to(digest)
        return await call

    await through_proxy("accept", env.accept(queue=queue))
    (claim,) = await through_proxy("claim", queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce()))
    await through_proxy("heartbeat", queue.heartbeat(claim.lease, progress=40))
    await through_proxy("release", queue.release(claim.lease))
    (claim,) = await queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce())
    image = await store_image(env.resources.images, claim)
    reply = await through_proxy("finish", queue.finish(claim.lease, [image], seconds=0.1))
    if reply not in (CommitReply.OK, CommitReply.DUPLICATE):
        await env.resources.images.delete(image.image_uri)  # what an attempt does that believes itself fenced
    await _also_fails(env, queue, through_proxy)
    await through_proxy("reap", queue.reap())


def _load_script(env: Environment, queue: JobQueue, move: str) -> str:
    """Load the script on the server and return its digest, as seen by the proxy.

    The lost reply is then that of a script which ran.
    """
    script = queue.scripts[move]
    with env.redis() as client:
        return str(client.script_load(script.text))


async def _also_fails(env: Environment, queue: JobQueue, through_proxy: Any) -> None:
    await env.accept(seed=8, may_end_as=[JobState.FAILED], queue=env.resources.queue)
    canceled = await env.accept(seed=9, may_end_as=[JobState.CANCELED], queue=env.resources.queue)
    await through_proxy("cancel", queue.cancel(canceled, account_id=None))
    (claim,) = await queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce())
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="boom")
    await through_proxy("fail", queue.fail(claim.lease, failure, retry=False))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection meanwhile.

    A full collection of all that a test session has made stops its only thread for 0.6 s, for 1.5 s on a busy machine
    (measured), and then calls that have their answer are out of time together.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def ingress(env: Environment, proxy: RedisProxy, tmp_path: Path) -> AsyncIterator[Ingress]:
    """The application on one side of the proxy."""
    async with open_ingress(env, tmp_path, _through(env, proxy)) as opened:
        yield opened


async def _post(ingress: Ingress, key: str) -> httpx.Response:
    headers = ingress.member.b | {"Idempotency-Key": key}
    return await ingress.post(BODY_B, headers, may_end_as=[JobState.CANCELED, JobState.COMPLETED])


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
async def test_an_ingress_cut_off_refuses_in_time_and_takes_the_request_later(
    env: Environment, proxy: RedisProxy, ingress: Ingress, fault: str
) -> None:
    assert (await _post(ingress, "first")).is_success
    getattr(proxy, fault)()
    began = time.monotonic()
    answers = await asyncio.gather(*(_post(ingress, f"key-{n}") for n in range(40)))
    took = time.monotonic() - began
    assert {answer.status_code for answer in answers} == {503}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    assert all(answer.json()["error"]["code"] == "unavailable" for answer in answers)
    assert took < REFUSED_WITHIN_S
    proxy.heal()
    again = await asyncio.gather(*(_post(ingress, f"key-{n}") for n in range(40)))
    assert [answer.text for answer in again if not answer.is_success] == []
    assert len(set(env.acknowledged.all)) == 41
    await env.cancels_well()


async def test_connections_that_a_peer_has_forgotten_cost_an_ingress_no_answer(
    env: Environment, proxy: RedisProxy, ingress: Ingress
) -> None:
    for cut in range(4):
        proxy.reset()
        listing = (ingress.client.get(path, headers=ingress.member.a) for path in ("/v1/jobs", "/v1/loras") * 5)
        answers = await asyncio.gather(*(_post(ingress, f"key-{cut}-{n}") for n in range(20)), *listing)
        assert {answer.status_code for answer in answers} == {200}
    await env.cancels_well()


@pytest.mark.soak
async def test_a_slow_connection_slows_and_refuses_nobody(
    env: Environment, proxy: RedisProxy, ingress: Ingress
) -> None:
    proxy.slow(0.2)
    answers = await asyncio.gather(*(_post(ingress, f"key-{n}") for n in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    await env.cancels_well()


@pytest.mark.soak
async def test_workers_behind_a_slow_connection_finish_their_jobs(env: Environment, proxy: RedisProxy) -> None:
    proxy.slow(0.2)
    for seed in range(3):
        await env.accept(seed=seed)
    env.worker(WorkerBehavior(reaps=True), settings=_through(env, proxy))
    await env.ends_well()
