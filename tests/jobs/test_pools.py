"""A group's jobs wait, run and are counted in a pool of their own, and follow their base model to another group."""

from datetime import timedelta

import pytest
import redis

from serve_app.domain.errors import QueueFull
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import GenerationDraft, GenerationRequest
from serve_app.jobs.queue import JobQueue
from serve_app.operations.metrics_page import render_metrics
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from tests.audit import audit
from tests.composition import Resources, open_resources
from tests.made_jobs import BROKEN, accept, caller_of, claim, finish, job_of
from tests.support import adapter_id, adapter_of, add_base_model, change_base_model, existing, put_in_group

NEON = adapter_id("neon")
SDXL = "generation.sdxl"


async def regroup(resources: Resources, group: str) -> None:
    put_in_group(resources.settings.catalog, group)
    await resources.applied_catalog.apply_file()


async def test_a_job_waits_in_the_pool_of_its_base_models_group(resources: Resources, redis_db: redis.Redis) -> None:
    before = await accept(resources, lora_id=NEON)
    assert [each.lease.job_id for each in await claim(resources)] == [before]
    await regroup(resources, "sdxl")
    job_id = await accept(resources, lora_id=NEON)
    job = await job_of(resources, job_id)
    assert (job.kind, job.pool) == (JobKind.GENERATION, SDXL)
    assert await claim(resources) == [], "the generators of another group cannot draw it"
    assert (await resources.queue_stats.backlog(SDXL)).ready == 1
    assert await resources.queue_stats.pools() == ["generation", SDXL, "upscale"]
    [claimed] = await claim(resources, worker="x", pool=SDXL)
    assert claimed.lease.job_id == job_id
    await finish(resources, claimed)
    assert (await job_of(resources, job_id)).kind is JobKind.GENERATION, "an ended job's record names no pool"
    assert await resources.recent_adapters.sample(SDXL, 3) == [(NEON, "")]
    assert await resources.recent_adapters.sample(JobKind.GENERATION, 3) == []
    assert audit(redis_db, max_attempts=3) == []


async def test_a_draft_of_jobs_is_accepted_into_the_pool_too(resources: Resources) -> None:
    await regroup(resources, "sdxl")
    caller = await caller_of(resources)
    hinted: list[str] = []

    async def hint(pool: str, _job_id: str) -> None:
        hinted.append(pool)

    async with open_resources(resources.settings, hint=hint) as service:
        request = existing((await job_of(service, await accept(service, lora_id=NEON))).request)
        assert isinstance(request, GenerationRequest)
        job = (await service.submission.submit(caller, GenerationDraft.like(request))).job
        await service.background.wait()
    assert (job.pool, hinted) == (SDXL, [SDXL])


async def test_waiting_jobs_follow_their_base_model_into_another_pool(
    resources: Resources, redis_db: redis.Redis
) -> None:
    """Without it they would wait for generators that no longer load their base model, until they expire."""
    leased = await accept(resources, lora_id=NEON)
    [claimed] = await claim(resources)
    retried = await accept(resources, lora_id=NEON)
    [lost] = await claim(resources)
    await resources.queue.fail(lost.lease, BROKEN, retry=True)
    due = redis_db.zscore(redis_key("delay", "generation"), retried)
    waiting = [await accept(resources, f"acct_{number}", lora_id=NEON) for number in range(3)]
    await regroup(resources, "sdxl")
    while await resources.queue.reap(limit=2) >= 2:
        assert audit(redis_db, max_attempts=3) == [], "between two batches, too"
    assert {(await job_of(resources, job_id)).pool for job_id in (retried, *waiting)} == {SDXL}
    assert redis_db.zscore(redis_key("delay", SDXL), retried) == due, "it goes on backing off"
    assert (await job_of(resources, leased)).pool == "generation", "a leased job ends where it is"
    assert audit(redis_db, max_attempts=3) == []
    assert await claim(resources, limit=9) == []
    claims = await claim(resources, worker="x", pool=SDXL, limit=9)
    assert [each.lease.job_id for each in claims] == waiting, "in their old order"
    await finish(resources, claimed)
    assert (await job_of(resources, leased)).state is JobState.COMPLETED


async def test_a_lora_on_another_base_model_waits_costs_and_is_prefetched_as_that_one_says(
    resources: Resources, redis_db: redis.Redis
) -> None:
    add_base_model(resources.settings.catalog, "turbo", group="sdxl", sampler="heun")
    await resources.applied_catalog.apply_file()
    jobs = [await accept(resources, lora_id=NEON, base_model=name, steps=9) for name in ("turbo", "pocket", "")]

    async def pools() -> list[str]:
        while await resources.queue.reap():
            assert audit(redis_db, max_attempts=3) == []
        return [(await job_of(resources, job_id)).pool for job_id in jobs]

    assert await pools() == [SDXL, "generation", "generation"]
    on_turbo, on_own, left_out = (int(str(redis_db.hget(redis_key("job", job_id), "work"))) for job_id in jobs)
    assert on_turbo == pytest.approx(2 * on_own, rel=0.01), "a step of its sampler asks the denoiser twice"
    assert on_own == left_out
    await regroup(resources, "klein")
    assert await pools() == [SDXL, "generation.klein", "generation.klein"]
    put_in_group(resources.settings.catalog, "default", "turbo")
    await resources.applied_catalog.apply_file()
    assert await pools() == ["generation", "generation.klein", "generation.klein"]
    [claimed] = await claim(resources, limit=9)
    await finish(resources, claimed)
    assert await resources.recent_adapters.sample("generation", 3) == [(NEON, "turbo")]


async def test_a_job_that_is_returned_or_tried_again_goes_to_the_pool_of_today(
    resources: Resources, redis_db: redis.Redis
) -> None:
    released, failed, lost, dead = [await accept(resources, lora_id=NEON) for _ in range(4)]
    leases = {claimed.lease.job_id: claimed.lease for claimed in await claim(resources, limit=9)}
    await resources.queue.fail(leases[dead], BROKEN, retry=False)
    await regroup(resources, "sdxl")
    await resources.queue.release(leases[released])
    await resources.queue.fail(leases[failed], BROKEN, retry=True)
    redis_db.zadd(redis_key("lease", "generation"), {lost: 1})
    await resources.queue.reap()
    assert await resources.dead_letters.requeue(dead)
    for job_id in (released, failed, lost, dead):
        assert (await job_of(resources, job_id)).pool == SDXL, job_id
    assert audit(redis_db, max_attempts=3) == []
    assert (await resources.queue_stats.backlog("generation")).seconds == 0
    assert (await resources.queue_stats.backlog(SDXL)).ready == 3


async def test_a_pool_is_forgotten_once_nothing_is_left_of_it(resources: Resources, redis_db: redis.Redis) -> None:
    await regroup(resources, "sdxl")
    job_id = await accept(resources, lora_id=NEON)
    [claimed] = await claim(resources, pool=SDXL)
    await regroup(resources, "default")
    await resources.queue.reap()
    assert SDXL in await resources.queue_stats.pools(), "its last job runs"
    await finish(resources, claimed)
    await resources.queue.reap()
    assert SDXL in await resources.queue_stats.pools(), "its worker may still ask"
    redis_db.zadd(redis_key("workers", SDXL), {"w": 1})
    await resources.queue.reap()
    assert await resources.queue_stats.pools() == ["generation", "upscale"]
    assert not redis_db.exists(redis_key("load", SDXL), redis_key("global_vtime", SDXL))
    await claim(resources, pool=SDXL)
    assert SDXL in await resources.queue_stats.pools(), "a worker that was silent for a minute is known again"
    assert (await job_of(resources, job_id)).state is JobState.COMPLETED


async def test_a_failed_job_that_is_queued_again_into_a_forgotten_pool_is_found_there(
    resources: Resources, redis_db: redis.Redis
) -> None:
    """Its base model has left the catalog: it waits for one that comes back, and not beyond its time."""
    await regroup(resources, "sdxl")
    job_id = await accept(resources, lora_id=NEON)
    [claimed] = await claim(resources, pool=SDXL)
    await resources.queue.fail(claimed.lease, BROKEN, retry=False)
    change_base_model(resources.settings.catalog, id="other", group="default")
    await resources.applied_catalog.apply_file()
    redis_db.zadd(redis_key("workers", SDXL), {"w": 1})
    await resources.queue.reap()
    assert SDXL not in await resources.queue_stats.pools()
    assert await resources.dead_letters.requeue(job_id)
    assert (await resources.queue_stats.backlog(SDXL)).ready == 1
    assert SDXL in await resources.queue_stats.pools(), "or nobody would see it, and it would never expire"


async def test_limits_and_operators_numbers_are_of_every_pool(resources: Resources, settings: Settings) -> None:
    await regroup(resources, "sdxl")
    caller = await caller_of(resources)
    job_id = await accept(resources, caller.account_id, lora_id=NEON, plan="basic")
    await resources.measures.show(SDXL, "w", {}, base_models=["pocket"], loras=[NEON])
    await claim(resources, pool=SDXL, limit=0)
    page = (
        await render_metrics(
            resources.measures,
            resources.queue_stats,
            resources.images,
            resources.space,
            settings.plan_table,
            event_streams=0,
        )
    ).decode()
    for line in (
        'atelier_jobs_ready{group="sdxl",kind="generation"} 1.0',
        'atelier_jobs_ready{group="default",kind="generation"} 0.0',
        'atelier_jobs_ready{group="",kind="upscale"} 0.0',
        'atelier_workers{group="sdxl",kind="generation"} 1.0',
        'atelier_adapter_evictions_total{group="sdxl",kind="generation"} 0.0',
    ):
        assert line in page
    assert (await resources.queue_stats.backlog(SDXL)).ready == 1
    assert [worker.name for worker in await resources.measures.shown(SDXL)] == ["w"]
    assert await resources.jobs.find(job_id)


async def test_a_sample_is_drawn_by_an_idle_pool_whatever_waits_in_others(resources: Resources) -> None:
    acme = await resources.accounts.create("acme")
    adapter = adapter_of(acme.id)
    await resources.adapter_registry.register(adapter)
    await resources.registration.ask_for_sample(adapter)
    await regroup(resources, "sdxl")
    await claim(resources)
    draw = resources.for_housekeeping.samples.draw_next
    assert await draw(every=timedelta(milliseconds=1)) == "", "no generator of its group lives"
    await accept(resources)
    await claim(resources, worker="x", pool=SDXL)
    job_id = await draw(every=timedelta(milliseconds=1))
    assert (await job_of(resources, job_id)).pool == SDXL


async def test_a_full_queue_and_a_deletion_count_every_pool(resources: Resources, redis_db: redis.Redis) -> None:
    await regroup(resources, "sdxl")
    acme = await resources.accounts.create("acme")
    adapter = adapter_of("")
    await resources.adapter_registry.register(adapter)
    waiting = await accept(resources, acme.id, lora_id=NEON)
    other = await accept(resources, acme.id, lora_id=NEON)
    full = resources.with_parts(queue=JobQueue(connect(resources.redis_url), _with_room_for(resources.settings, 2)))
    with pytest.raises(QueueFull):
        await accept(full, "acct_other")
    for job_id in (waiting, other):
        await resources.queue.cancel(job_id, account_id=None)
    redis_db.zadd(redis_key("idle_vtime", SDXL), {acme.id: 9})
    redis_db.lpush(redis_key("recent_adapters", SDXL), adapter.id, f"{adapter.id} pocket")
    await resources.adapter_registry.remove(adapter.id)
    assert await resources.recent_adapters.sample(SDXL, 3) == [], "nobody prefetches what is gone"
    await resources.account_records.remove(acme.id)
    assert not redis_db.exists(redis_key("idle_vtime", SDXL))


def _with_room_for(settings: Settings, jobs: int) -> Settings:
    return settings.model_copy(update={"max_queued": jobs})
