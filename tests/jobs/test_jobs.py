"""The job queue and its reads on a real server: what owners, operators and autoscaling see."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serve_app.domain.digests import Digests
from serve_app.domain.durations import Position, from_epoch_ms
from serve_app.domain.errors import FailureCode, IdempotencyConflict, NotFound, QueueFull, StoreUnavailable
from serve_app.domain.jobs import (
    CommitReply,
    Failure,
    HeartbeatReply,
    JobKind,
    JobState,
    Lease,
)
from serve_app.domain.requests import GenerationRequest, LoraUse, Request, UpscaleRequest, Variant
from serve_app.jobs import history
from serve_app.jobs.acceptance import STORED_RETRY_S
from serve_app.jobs.backlog import read_backlog
from serve_app.jobs.history import LIST_LIMIT, NO_KEY, JobFilter
from serve_app.jobs.queue import JobQueue, new_nonce
from serve_app.jobs.records import JOB_BYTES
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from tests.audit import audit
from tests.composition import Resources
from tests.made_jobs import accept, claim, job_of, new_job, stored_image
from tests.support import existing, memory_limit, wait_until

REQUEST = GenerationRequest(
    prompt='a "quoted" boat 🛶\n', loras=(LoraUse("model_x"),), negative_prompt="rain", seeds=(0, 2**64 - 1), steps=20
)
UPSCALE = UpscaleRequest(image_id="img_x", scale_factor=4, source_uri="memory://x", source_width=512, source_height=768)
POISON = Failure(code=FailureCode.OUT_OF_MEMORY, message="too large for this device")


async def _claim(queue: JobQueue, *, limit: int = 8) -> list[Lease]:
    claims = await queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce(), limit=limit)
    return [claim.lease for claim in claims]


@pytest.mark.parametrize("request_", [REQUEST, UPSCALE], ids=["generation", "upscale"])
async def test_a_request_comes_back_word_for_word(resources: Resources, request_: Request) -> None:
    accepted = await resources.queue.accept(new_job(request=request_))
    read = existing(await resources.jobs.get(accepted.job.id, account_id="acct_a", variant=Variant.A))
    assert read.request == request_
    assert (read.state, read.progress, read.attempt, accepted.replayed) == (JobState.QUEUED, 0, 0, False)
    (claim,) = await resources.queue.claim("w", pool=read.kind, nonce="n")
    assert (claim.request, claim.created_at, claim.account_id) == (request_, read.created_at, "acct_a")


async def test_the_full_queue_and_the_full_account_turn_jobs_away(settings: Settings, resources: Resources) -> None:
    client = connect(resources.redis_url)
    small = JobQueue(client, settings.model_copy(update={"max_queued": 3, "max_queued_per_account": 2}))
    for account in ("acct_a", "acct_a", "acct_b"):
        await small.accept(new_job(account, images=2))
    with pytest.raises(QueueFull, match="queue is full"):
        await small.accept(new_job("acct_c"))
    assert len(await _claim(small, limit=4)) == 2
    await small.accept(new_job("acct_c"))
    with pytest.raises(QueueFull, match="2 unfinished jobs"):
        await small.accept(new_job("acct_a"))
    await client.aclose()


async def test_a_job_whose_picture_was_deleted_meanwhile_is_refused(resources: Resources) -> None:
    with pytest.raises(NotFound, match="no such image"):
        await accept(resources, pictures=("img_gone",))
    assert await resources.job_history.list("acct_a") == []


async def test_a_key_with_another_body_is_a_conflict_and_is_of_one_account_and_variant(resources: Resources) -> None:
    first = await resources.queue.accept(new_job(idempotency_key="k", body=Digests("one")))
    with pytest.raises(IdempotencyConflict):
        await resources.queue.accept(new_job(idempotency_key="k", body=Digests("two")))
    other = await resources.queue.accept(new_job(idempotency_key="k", body=Digests("two"), variant=Variant.B))
    assert other.job.id != first.job.id
    anothers = await resources.queue.accept(new_job("acct_b", idempotency_key="k", body=Digests("one")))
    assert anothers.job.id != first.job.id
    empty = await resources.queue.accept(new_job(idempotency_key="", body=Digests("two")))
    assert not empty.replayed


async def test_operators_see_everyones_jobs_by_state(resources: Resources) -> None:
    ids = [await accept(resources, account) for account in ("acct_a", "acct_b", "acct_c")]
    (lease,) = await _claim(resources.queue, limit=1)
    assert {job.id for job in await resources.job_history.list_all()} == set(ids)
    assert [job.id for job in await resources.job_history.list_all(JobState.RUNNING)] == [lease.job_id]
    assert len(await resources.job_history.list_all(limit=2)) == 2
    assert (await job_of(resources, lease.job_id)).state is JobState.RUNNING
    assert await resources.jobs.find("gen_unknown") is None


@pytest.mark.slow
async def test_the_list_of_everyones_jobs_ends_after_the_newest_ten_thousand(
    resources: Resources, redis_db: Any
) -> None:
    oldest = await job_of(resources, await accept(resources))
    later = oldest.created_at.timestamp() * 1000 + 1
    gone = {f"gen_{number}": later for number in range(LIST_LIMIT - 1)}
    redis_db.zadd(redis_key("recent"), gone)  # jobs whose records retention has removed
    assert [job.id for job in await resources.job_history.list_all()] == [oldest.id]
    redis_db.zadd(redis_key("recent"), {"gen_more": later})
    assert await resources.job_history.list_all() == []


async def test_a_dead_letter_is_listed_and_can_be_sent_back_to_work(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(resources, request=REQUEST, weights="9" * 64)
    (lease,) = await _claim(resources.queue)
    long = replace(POISON, message="x" * 10_000)
    assert await resources.queue.fail(lease, long, retry=False) is CommitReply.OK
    kept = replace(long, message="x" * 500)
    assert [(dead.id, dead.failure) for dead in await resources.dead_letters.list()] == [(job_id, kept)]
    assert await resources.dead_letters.requeue(job_id)
    assert not await resources.dead_letters.requeue(job_id)
    assert await resources.dead_letters.list() == []
    assert (await job_of(resources, job_id)).failure is None
    (again,) = await claim(resources)
    assert (again.lease.attempt, again.request, again.weights, again.account_id) == (2, REQUEST, "9" * 64, "acct_a")
    images = [stored_image(f"memory://{job_id}") for _ in REQUEST.seeds]
    assert await resources.queue.finish(again.lease, images, seconds=1) is CommitReply.OK
    assert not {"group", "work", "sequence", "code"} & redis_db.hgetall(redis_key("job", job_id)).keys()
    assert audit(redis_db, max_attempts=5) == []


async def test_a_page_of_dead_letters_looks_at_so_many_and_says_where_to_go_on(
    resources: Resources, redis_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "FAILED_AT_ONCE", 2)
    monkeypatch.setattr(history, "CALLS", 2)
    ids = [await accept(resources, account) for account in ("acct_a", "acct_b", "acct_b", "acct_b")]
    for lease in await _claim(resources.queue):
        assert await resources.queue.fail(lease, POISON, retry=False) is CommitReply.OK
    redis_db.zadd(redis_key("dead"), {job_id: number for number, job_id in enumerate(ids)})
    first = await resources.dead_letters.page(account="acct_a", limit=1)
    assert (first.jobs, first.next) == ([], Position(1, ids[1]))
    assert first.counts == {}, "among the newest two"
    rest = await resources.dead_letters.page(account="acct_a", limit=1, after=first.next)
    assert ([job.id for job in rest.jobs], rest.next) == (ids[:1], None)


async def test_the_backlog_reads_the_same_with_either_client(resources: Resources) -> None:
    for _ in range(3):
        await accept(resources)
    await _claim(resources.queue, limit=1)
    backlog = await resources.queue_stats.backlog(JobKind.GENERATION)
    assert (backlog.ready, backlog.leased, backlog.delayed) == (2, 1, 0)
    assert backlog.seconds > 0
    blocking = await asyncio.to_thread(read_backlog, resources.redis_url, JobKind.GENERATION)
    assert (blocking.ready, blocking.seconds) == (backlog.ready, backlog.seconds)

    async def has_aged() -> bool:
        return 0.05 < (await resources.queue_stats.backlog(JobKind.GENERATION)).oldest_age_s < 5

    await wait_until(has_aged)
    assert (await resources.queue_stats.backlog(JobKind.UPSCALE)).seconds == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_a_time_that_cannot_be_is_our_own_mistake(resources: Resources, seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        await resources.queue.finish(Lease("gen_x", 1), [], seconds=seconds)


async def test_a_deleted_job_leaves_the_idempotency_key_to_the_job_that_has_it_by_now(
    resources: Resources, redis_db: Any
) -> None:
    """As when the key's 24 hours were over and it was used again, before the first job is deleted."""
    first = await accept(resources, idempotency_key="k")
    (name,) = redis_db.scan_iter(match=redis_key("idempotency", "acct_a", "a", "*"))
    redis_db.delete(name)
    second = await accept(resources, idempotency_key="k")
    for job_id, is_left in ((first, 1), (second, 0)):
        await resources.queue.cancel(job_id, account_id="acct_a")
        assert await resources.deletions.delete_job(job_id, account_id="acct_a")
        assert redis_db.exists(name) == is_left


async def test_a_server_with_no_memory_left_refuses_new_jobs_and_lets_running_ones_end(
    resources: Resources, redis_db: Any
) -> None:
    job_ids = [await accept(resources) for _ in range(3)]
    leases = await _claim(resources.queue)
    before = await resources.queue_stats.counts()
    with memory_limit(redis_db):
        with pytest.raises(StoreUnavailable):
            await accept(resources)
        assert [await resources.queue.heartbeat(lease, progress=50) for lease in leases] == [HeartbeatReply.OK] * 3
        assert await resources.queue.finish(leases[0], [stored_image("memory://x")], seconds=1) is CommitReply.OK
        assert await resources.queue.fail(leases[1], POISON, retry=True) is CommitReply.REQUEUED
        assert await resources.queue.release(leases[2]) is CommitReply.REQUEUED
        assert len(await _claim(resources.queue, limit=1)) == 1
        assert await resources.queue.cancel(job_ids[1], account_id=None)
        assert await resources.queue.cancel(job_ids[2], account_id=None)
        assert await resources.queue.reap() == 0
    assert (await resources.queue_stats.counts())["accepted"] == before["accepted"], (
        "a refused accept left nothing behind"
    )
    assert audit(redis_db, max_attempts=5) == []


async def test_an_account_over_its_stored_bytes_is_refused_until_jobs_are_deleted_or_gone(
    resources: Resources, redis_db: Any
) -> None:
    admin, stored = redis_db, redis_key("stored", "acct_a", Variant.A)
    job_ids = [await accept(resources) for _ in range(2)]
    (whole,) = map(int, admin.hvals(stored))
    assert whole > 2 * JOB_BYTES
    await resources.queue.cancel(job_ids[0], account_id=None)
    with pytest.raises(QueueFull, match="delete jobs") as refused:
        await accept(resources, max_stored=whole)
    assert refused.value.retry_after_s == STORED_RETRY_S
    await accept(resources, max_stored=whole, variant=Variant.B)
    await accept(resources, "acct_b", max_stored=whole)
    assert await resources.deletions.delete_job(job_ids[0], account_id="acct_a")
    job_ids[0] = await accept(resources, max_stored=whole)
    (day,) = admin.hkeys(stored)
    admin.hset(stored, str(int(day) - 33), 10**9)
    await accept(resources, max_stored=10 * whole)
    assert admin.hkeys(stored) == [day], "a day of which no job can be left"
    assert audit(redis_db, max_attempts=5) == []


async def test_the_audit_can_fail(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(resources)
    assert audit(redis_db, max_attempts=5) == []
    redis_db.hset(redis_key("job", job_id), "state", "running")
    problems = "\n".join(audit(redis_db, max_attempts=5))
    assert "running, but in ['queue:generation:acct_a']" in problems
    redis_db.hset(redis_key("job", job_id), "state", "queued")
    redis_db.hincrby(redis_key("unfinished"), "acct_a", 1)
    redis_db.hincrby(redis_key("stored", "acct_a", "a"), "20000", 1)
    problems = "\n".join(audit(redis_db, max_attempts=5))
    assert "live jobs per account" in problems
    assert "stored bytes of acct_a:a" in problems


async def test_a_page_takes_what_its_filter_names_and_goes_on_where_the_last_ended(
    resources: Resources, redis_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so also when a call of the script sees fewer records than the page takes.

    And when many jobs have one time.
    """
    monkeypatch.setattr(history, "LOOKED_AT_ONCE", 3)
    monkeypatch.setattr(history, "READ_AT_MOST", 3)
    ids = [
        await accept(resources, key_id=key_id, metadata={"key": key_id, "n": "1"}, base_model=base_model)
        for key_id, base_model in [*[("k2", ""), ("k1", "pocket")] * 4, ("", "other")]
    ]
    redis_db.hset(redis_key("lora", "model_x"), "base_model", "sdxl")
    await resources.queue.cancel(ids[0], account_id=None)
    redis_db.zadd(redis_key("jobs", "acct_a"), dict.fromkeys(ids, 1000))
    cases: list[tuple[JobFilter, set[str]]] = [
        (JobFilter(), set(ids)),
        (JobFilter(key_id="k1"), set(ids[1::2])),
        (JobFilter(key_id=NO_KEY), {ids[8]}),
        (JobFilter(state=JobState.CANCELED), {ids[0]}),
        (JobFilter(lora_id="model_other"), set()),
        (JobFilter(since=from_epoch_ms(1000), until=from_epoch_ms(1001)), set(ids)),
        (JobFilter(until=from_epoch_ms(1000)), set()),
        (JobFilter(since=from_epoch_ms(1001)), set()),
        (JobFilter(kind=JobKind.GENERATION), set(ids)),
        (JobFilter(kind=JobKind.UPSCALE), set()),
        (JobFilter(metadata={"key=k1", "n=1"}), set(ids[1::2])),
        (JobFilter(metadata={"key=k1", "n=2"}), set()),
        (JobFilter(base_model="pocket"), set(ids[1::2])),
        (JobFilter(base_model="sdxl", key_id="k2", metadata={"key=k2"}), set(ids[:8:2])),
    ]
    for only, wanted in cases:
        found: list[str] = []
        place: Position | None = None
        for _ in range(9):
            page = await resources.job_history.page("acct_a", limit=2, only=only, after=place)
            found += [job.id for job in page.jobs]
            place = page.next
            if place is None:
                break
        assert place is None
        assert found == sorted(wanted, reverse=True), only
    assert (await resources.job_history.page("acct_b", limit=2)).jobs == []


async def test_a_worker_that_holds_ten_thousand_adapters_claims_jobs(resources: Resources) -> None:
    job_id = await accept(resources)
    held = [f"{number:064x}" for number in range(10_000)]
    claims = await resources.queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce(), resident=held)
    assert [claim.lease.job_id for claim in claims] == [job_id]
