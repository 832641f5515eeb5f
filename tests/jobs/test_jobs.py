"""The job queue and its reads on a real server: what owners, operators and autoscaling see."""

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest
import redis

from serve_app.domain.durations import Position, from_epoch_ms
from serve_app.domain.errors import FailureCode, IdempotencyConflict, QueueFull, StoreUnavailable
from serve_app.domain.jobs import (
    CommitReply,
    Failure,
    HeartbeatReply,
    Job,
    JobKind,
    JobState,
    Lease,
    NewJob,
    StoredImage,
    new_image_id,
    new_job_id,
)
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant
from serve_app.jobs import history as dead_letters_module
from serve_app.jobs import history as job_history
from serve_app.jobs.acceptance import STORED_RETRY_S, Acceptance
from serve_app.jobs.backlog import QueueStats, read_backlog
from serve_app.jobs.history import LIST_LIMIT, NO_KEY, DeadLetters, JobFilter, JobHistory, JobReader
from serve_app.jobs.queue import JobQueue, new_nonce
from serve_app.jobs.records import JOB_BYTES
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from serve_app.worker.attempt import retry_until_available
from tests.audit import audit
from tests.composition import Resources
from tests.support import wait_until

REQUEST = GenerationRequest(
    prompt='a "quoted" boat 🛶\n', lora_id="model_x", negative_prompt="rain", seeds=(0, 2**64 - 1), steps=20
)
UPSCALE = UpscaleRequest(image_id="img_x", scale_factor=4, source_uri="memory://x", source_width=512, source_height=768)
POISON = Failure(code=FailureCode.OUT_OF_MEMORY, message="too large for this device")


@pytest.fixture
def queue(resources: Resources) -> JobQueue:
    return resources.queue


@pytest.fixture
def jobs(resources: Resources) -> JobReader:
    return resources.jobs


@pytest.fixture
def history(resources: Resources) -> JobHistory:
    return resources.job_history


@pytest.fixture
def stats(resources: Resources) -> QueueStats:
    return resources.queue_stats


@pytest.fixture
def dead_letters(resources: Resources) -> DeadLetters:
    return resources.dead_letters


async def _accept(queue: JobQueue, *, account: str = "acct_a", request: Request = REQUEST, **more: Any) -> Acceptance:
    kind = JobKind.UPSCALE if isinstance(request, UpscaleRequest) else JobKind.GENERATION
    args: dict[str, Any] = {"job_id": new_job_id(kind), "variant": Variant.A, "group": "g", **more}
    return await queue.accept(NewJob(account_id=account, request=request, **args))


async def _claim(queue: JobQueue, *, kind: JobKind = JobKind.GENERATION, limit: int = 8) -> list[Lease]:
    claims = await queue.claim("w", kind=kind, nonce=new_nonce(), resident=("g",), limit=limit)
    return [claim.lease for claim in claims]


def _image(job_id: str) -> StoredImage:
    return StoredImage(
        image_id=new_image_id(), image_uri=f"memory://{job_id}", width=512, height=512, sha256="0" * 64, size_bytes=9
    )


@pytest.mark.parametrize("request_", [REQUEST, UPSCALE], ids=["generation", "upscale"])
async def test_a_request_comes_back_word_for_word(queue: JobQueue, jobs: JobReader, request_: Request) -> None:
    accepted = await _accept(queue, request=request_)
    read = await jobs.get(accepted.job.id, account_id="acct_a", variant=Variant.A)
    assert read is not None
    assert read.request == request_
    assert (read.state, read.progress, read.attempt, accepted.replayed) == (JobState.QUEUED, 0, 0, False)
    (claim,) = await queue.claim("w", kind=read.kind, nonce="n")
    assert (claim.request, claim.created_at, claim.account_id) == (request_, read.created_at, "acct_a")


async def test_a_job_lives_from_accept_to_images(queue: JobQueue, jobs: JobReader, redis_db: redis.Redis) -> None:
    job_id = (await _accept(queue)).job.id
    (lease,) = await _claim(queue)
    assert await queue.heartbeat(lease, progress=43) is HeartbeatReply.OK
    running = await _get(jobs, job_id)
    assert (running.state, running.progress, running.images) == (JobState.RUNNING, 43, ())
    images = (_image(job_id), _image(job_id))
    assert await queue.finish(lease, images, seconds=3.0) is CommitReply.OK
    done = await _get(jobs, job_id)
    assert (done.state, done.progress, done.images, done.finish_estimate) == (JobState.COMPLETED, 100, images, None)
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    assert audit(redis_db, max_attempts=5) == []


async def test_the_full_queue_and_the_full_account_turn_jobs_away(settings: Settings, resources: Resources) -> None:
    client = connect(resources.redis_url)
    small = JobQueue(client, settings.model_copy(update={"max_queued": 3, "max_queued_per_account": 2}))
    for account in ("acct_a", "acct_a", "acct_b"):
        await _accept(small, account=account)
    with pytest.raises(QueueFull, match="queue is full"):
        await _accept(small, account="acct_c")
    assert len(await _claim(small, limit=4)) == 2
    await _accept(small, account="acct_c")
    with pytest.raises(QueueFull, match="2 unfinished jobs"):
        await _accept(small, account="acct_a")
    await client.aclose()


@pytest.mark.slow
async def test_a_hundred_posts_with_one_key_make_one_job(queue: JobQueue, stats: QueueStats) -> None:
    async def post() -> Acceptance:
        """A refused connection is no answer: on a stalled machine the same call is made again, as it may be."""
        args: dict[str, Any] = {
            "job_id": new_job_id(JobKind.GENERATION),
            "idempotency_key": "k" * 300,
            "body_sha256": "same",
        }
        return await retry_until_available(lambda: _accept(queue, **args), within=timedelta(seconds=60))

    accepted = await asyncio.gather(*(post() for _ in range(100)))
    assert len({one.job.id for one in accepted}) == 1
    assert sum(not one.replayed for one in accepted) == 1
    assert (await stats.backlog(JobKind.GENERATION)).ready == 1


async def test_a_key_with_another_body_is_a_conflict_and_its_own_on_each_variant(queue: JobQueue) -> None:
    first = await _accept(queue, idempotency_key="k", body_sha256="one")
    with pytest.raises(IdempotencyConflict):
        await _accept(queue, idempotency_key="k", body_sha256="two")
    other = await _accept(queue, idempotency_key="k", body_sha256="two", variant=Variant.B)
    assert other.job.id != first.job.id
    empty = await _accept(queue, idempotency_key="", body_sha256="two")
    assert not empty.replayed


async def test_jobs_are_listed_newest_first(queue: JobQueue, history: JobHistory) -> None:
    made: list[str] = []
    for _ in range(5):
        made.append((await _accept(queue)).job.id)
        await asyncio.sleep(0.002)  # the listing's order is by millisecond
    await _accept(queue, account="acct_b")
    assert [job.id for job in await history.list("acct_a", limit=2)] == made[:2:-1]
    assert await history.list("acct_nobody") == []


async def test_operators_see_everyones_jobs_by_state(queue: JobQueue, jobs: JobReader, history: JobHistory) -> None:
    ids = [(await _accept(queue, account=account)).job.id for account in ("acct_a", "acct_b", "acct_c")]
    (lease,) = await _claim(queue, limit=1)
    assert {job.id for job in await history.list_all()} == set(ids)
    assert [job.id for job in await history.list_all(JobState.RUNNING)] == [lease.job_id]
    assert len(await history.list_all(limit=2)) == 2
    shown = await jobs.find(lease.job_id)
    assert shown is not None
    assert shown.state is JobState.RUNNING
    assert await jobs.find("gen_unknown") is None


@pytest.mark.slow
async def test_the_list_of_everyones_jobs_ends_after_the_newest_ten_thousand(
    queue: JobQueue, jobs: JobReader, redis_db: redis.Redis, history: JobHistory
) -> None:
    oldest = (await _accept(queue)).job
    later = oldest.created_at.timestamp() * 1000 + 1
    gone = {f"gen_{number}": later for number in range(LIST_LIMIT - 1)}
    cast(Any, redis_db).zadd(redis_key("recent"), gone)  # jobs whose records retention has removed
    assert [job.id for job in await history.list_all()] == [oldest.id]
    cast(Any, redis_db).zadd(redis_key("recent"), {"gen_more": later})
    assert await history.list_all() == []


async def test_a_dead_letter_is_listed_and_can_be_sent_back_to_work(
    queue: JobQueue, jobs: JobReader, dead_letters: DeadLetters, redis_db: redis.Redis
) -> None:
    job_id = (await _accept(queue)).job.id
    (lease,) = await _claim(queue)
    assert await queue.fail(lease, POISON, retry=False) is CommitReply.OK
    assert [(dead.id, dead.failure) for dead in await dead_letters.list()] == [(job_id, POISON)]
    assert await dead_letters.requeue(job_id)
    assert not await dead_letters.requeue(job_id)
    assert await dead_letters.list() == []
    assert (await _get(jobs, job_id)).failure is None
    (again,) = await _claim(queue)
    assert again.attempt == 2
    assert await queue.finish(again, [_image(job_id)], seconds=1) is CommitReply.OK
    assert audit(redis_db, max_attempts=5) == []


async def test_a_page_of_dead_letters_looks_at_so_many_and_says_where_to_go_on(
    queue: JobQueue, dead_letters: DeadLetters, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters_module, "FAILED_AT_ONCE", 2)
    monkeypatch.setattr(dead_letters_module, "CALLS", 2)
    ids = [(await _accept(queue, account=account)).job.id for account in ("acct_a", "acct_b", "acct_b", "acct_b")]
    for lease in await _claim(queue):
        assert await queue.fail(lease, POISON, retry=False) is CommitReply.OK
    cast(Any, redis_db).zadd(redis_key("dead"), {job_id: number for number, job_id in enumerate(ids)})
    first = await dead_letters.page(account="acct_a", limit=1)
    assert (first.jobs, first.next) == ([], Position(1, ids[1]))
    assert first.counts == {}, "among the newest two"
    rest = await dead_letters.page(account="acct_a", limit=1, after=first.next)
    assert ([job.id for job in rest.jobs], rest.next) == (ids[:1], None)


async def test_the_backlog_reads_the_same_with_either_client(
    queue: JobQueue, resources: Resources, stats: QueueStats
) -> None:
    for _ in range(3):
        await _accept(queue)
    await _claim(queue, limit=1)
    backlog = await stats.backlog(JobKind.GENERATION)
    assert (backlog.ready, backlog.leased, backlog.delayed) == (2, 1, 0)
    assert backlog.seconds > 0
    blocking = await asyncio.to_thread(read_backlog, resources.redis_url, JobKind.GENERATION)
    assert (blocking.ready, blocking.seconds) == (backlog.ready, backlog.seconds)

    async def has_aged() -> bool:
        return 0.05 < (await stats.backlog(JobKind.GENERATION)).oldest_age_s < 5

    await wait_until(has_aged)
    assert (await stats.backlog(JobKind.UPSCALE)).seconds == 0


async def test_a_message_is_kept_short(queue: JobQueue, jobs: JobReader) -> None:
    job_id = (await _accept(queue)).job.id
    (lease,) = await _claim(queue)
    await queue.fail(lease, Failure(code=FailureCode.TIMEOUT, message="x" * 10_000), retry=False)
    failure = (await _get(jobs, job_id)).failure
    assert failure is not None
    assert len(failure.message) == 500


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_a_time_that_cannot_be_is_our_own_mistake(queue: JobQueue, seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        await queue.finish(Lease("gen_x", 1), [], seconds=seconds)


async def test_a_real_lease_runs_out_and_another_worker_gets_the_job(settings: Settings, resources: Resources) -> None:
    client = connect(resources.redis_url)
    quick = JobQueue(client, settings.model_copy(update={"lease": timedelta(milliseconds=50)}))
    await _accept(quick)
    (zombie,) = await _claim(quick)

    async def is_reaped() -> bool:
        return await quick.reap() > 0

    await wait_until(is_reaped)
    (lease,) = await _claim(quick)
    assert lease.attempt == zombie.attempt + 1
    assert await quick.finish(zombie, [_image("zombie")], seconds=1) is CommitReply.FENCED
    assert await quick.finish(lease, [_image("right")], seconds=1) is CommitReply.OK
    done = await _get(resources.jobs, lease.job_id)
    assert done.images[0].image_uri == "memory://right"
    await client.aclose()


async def test_a_released_job_that_was_canceled_meanwhile_ends(
    queue: JobQueue, jobs: JobReader, redis_db: redis.Redis
) -> None:
    job_id = (await _accept(queue)).job.id
    (lease,) = await _claim(queue)
    assert await queue.cancel(job_id, account_id="acct_a") is JobState.RUNNING
    assert await queue.release(lease) is CommitReply.CANCELED
    assert await queue.release(lease) is CommitReply.CANCELED, "as when the first reply was lost"
    assert (await _get(jobs, job_id)).state is JobState.CANCELED
    assert audit(redis_db, max_attempts=5) == []


async def test_a_deleted_job_leaves_the_idempotency_key_to_the_job_that_has_it_by_now(
    queue: JobQueue, resources: Resources, redis_db: redis.Redis
) -> None:
    """As when the key's 24 hours were over and it was used again, before the first job is deleted."""
    first = (await _accept(queue, idempotency_key="k")).job.id
    (name,) = redis_db.scan_iter(match=redis_key("idempotency", "acct_a", "a", "*"))
    redis_db.delete(name)
    second = (await _accept(queue, idempotency_key="k")).job.id
    for job_id, is_left in ((first, 1), (second, 0)):
        await queue.cancel(job_id, account_id="acct_a")
        assert await resources.deletions.delete_job(job_id, account_id="acct_a")
        assert redis_db.exists(name) == is_left


async def test_a_job_whose_images_cannot_be_read_is_deleted_with_its_folder(
    queue: JobQueue, resources: Resources, redis_db: redis.Redis
) -> None:
    job_id = (await _accept(queue)).job.id
    (lease,) = await _claim(queue)
    await queue.finish(lease, [_image(job_id)], seconds=1)
    cast(Any, redis_db).hset(redis_key("job", job_id), "r0", "[{")
    assert await resources.deletions.delete_job(job_id, account_id="acct_a")
    objects = await resources.deletions.objects(job_id)
    assert objects is not None
    assert job_id in objects.folder
    assert not redis_db.exists(redis_key("job", job_id))


async def test_a_server_with_no_memory_left_refuses_new_jobs_and_lets_running_ones_end(
    queue: JobQueue, redis_db: redis.Redis, stats: QueueStats
) -> None:
    job_ids = [(await _accept(queue)).job.id for _ in range(3)]
    leases = await _claim(queue)
    admin = cast(Any, redis_db)
    before = await stats.counts()
    admin.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await _accept(queue)
        assert [await queue.heartbeat(lease, progress=50) for lease in leases] == [HeartbeatReply.OK] * 3
        assert await queue.finish(leases[0], [_image(job_ids[0])], seconds=1) is CommitReply.OK
        assert await queue.fail(leases[1], POISON, retry=True) is CommitReply.REQUEUED
        assert await queue.release(leases[2]) is CommitReply.REQUEUED
        assert len(await _claim(queue, limit=1)) == 1
        assert await queue.cancel(job_ids[1], account_id=None)
        assert await queue.cancel(job_ids[2], account_id=None)
        assert await queue.reap() == 0
    finally:
        admin.config_set("maxmemory", "0")
    assert (await stats.counts())["accepted"] == before["accepted"], "a refused accept left nothing behind"
    assert audit(redis_db, max_attempts=5) == []


async def test_an_account_over_its_stored_bytes_is_refused_until_jobs_are_deleted_or_gone(
    queue: JobQueue, resources: Resources, redis_db: redis.Redis
) -> None:
    admin, stored = cast(Any, redis_db), redis_key("stored", "acct_a", Variant.A)
    job_ids = [(await _accept(queue)).job.id for _ in range(2)]
    (whole,) = map(int, admin.hvals(stored))
    assert whole > 2 * JOB_BYTES
    await queue.cancel(job_ids[0], account_id=None)
    with pytest.raises(QueueFull, match="delete jobs") as refused:
        await _accept(queue, max_stored=whole)
    assert refused.value.retry_after_s == STORED_RETRY_S
    await _accept(queue, max_stored=whole, variant=Variant.B)
    await _accept(queue, max_stored=whole, account="acct_b")
    assert await resources.deletions.delete_job(job_ids[0], account_id="acct_a")
    job_ids[0] = (await _accept(queue, max_stored=whole)).job.id
    (day,) = admin.hkeys(stored)
    admin.hset(stored, str(int(day) - 33), 10**9)
    await _accept(queue, max_stored=10 * whole)
    assert admin.hkeys(stored) == [day], "a day of which no job can be left"
    assert audit(redis_db, max_attempts=5) == []


async def test_the_audit_can_fail(queue: JobQueue, redis_db: redis.Redis) -> None:
    job_id = (await _accept(queue)).job.id
    assert audit(redis_db, max_attempts=5) == []
    untyped = cast(Any, redis_db)
    untyped.hset(redis_key("job", job_id), "state", "running")
    problems = "\n".join(audit(redis_db, max_attempts=5))
    assert "running, but in ['queue:generation:acct_a']" in problems
    untyped.hset(redis_key("job", job_id), "state", "queued")
    untyped.hincrby(redis_key("unfinished"), "acct_a", 1)
    untyped.hincrby(redis_key("stored", "acct_a", "a"), "20000", 1)
    problems = "\n".join(audit(redis_db, max_attempts=5))
    assert "live jobs per account" in problems
    assert "stored bytes of acct_a:a" in problems


async def _get(jobs: JobReader, job_id: str) -> Job:
    job = await jobs.get(job_id, account_id="acct_a")
    assert job is not None
    return job


async def test_a_page_takes_what_its_filter_names_and_goes_on_where_the_last_ended(
    queue: JobQueue, jobs: JobReader, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch, history: JobHistory
) -> None:
    """It does so also when a call of the script sees fewer records than the page takes.

    And when many jobs have one time.
    """
    monkeypatch.setattr(job_history, "LOOKED_AT_ONCE", 3)
    ids = [(await _accept(queue, key_id=key_id)).job.id for key_id in [*["k2", "k1"] * 4, ""]]
    await queue.cancel(ids[0], account_id=None)
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
    ]
    for only, wanted in cases:
        found: list[str] = []
        place: Position | None = None
        for _ in range(9):
            page = await history.page("acct_a", limit=2, only=only, after=place)
            found += [job.id for job in page.jobs]
            place = page.next
            if place is None:
                break
        assert place is None
        assert found == sorted(wanted, reverse=True), only
    assert (await history.page("acct_b", limit=2)).jobs == []


async def test_a_worker_that_holds_ten_thousand_adapters_claims_jobs(queue: JobQueue) -> None:
    accepted = await _accept(queue)
    held = [f"{number:064x}" for number in range(10_000)]
    claims = await queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce(), resident=held)
    assert [claim.lease.job_id for claim in claims] == [accepted.job.id]
