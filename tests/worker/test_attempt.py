"""One attempt: how each end of its runs, of its storage and of its lease becomes the job's."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import redis

from serve_app.domain.errors import FailureCode, StoreUnavailable
from serve_app.domain.jobs import Failure, JobState
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.worker.attempt import retry_until_available
from serve_app.worker.executor import NotLoaded, RunFailed
from tests.audit import audit
from tests.composition import Resources, open_resources
from tests.made_jobs import ACCOUNT, accept, failure_of, job_of
from tests.rewriting import replacing
from tests.support import adapter_id, wait_until
from tests.worker.scripted_executor import Result, ScriptedExecutor, until, with_queue, working

NEON = adapter_id("neon")

BROKEN = Failure(code=FailureCode.GENERATION_FAILED, message="The decoder's output is not finite.")
TOO_LARGE = Failure(code=FailureCode.OUT_OF_MEMORY, message="The image does not fit into the device's memory.")
SOON = timedelta(seconds=30)


async def _is_at(resources: Resources, job_id: str, progress: int) -> bool:
    return (await job_of(resources, job_id)).progress == progress


def _stored(resources: Resources) -> Sequence[Path]:
    return [path for path in (resources.settings.data_dir / "images").rglob("*.png") if path.is_file()]


@pytest.mark.parametrize(("result", "failure"), [
    (BROKEN, BROKEN),
    ("nothing", Failure(code=FailureCode.GENERATION_FAILED, message="The image could not be made.")),
], ids=["of its own", "none"])  # fmt: skip
async def test_a_failed_run_ends_its_job_with_its_failure_or_else_a_general_one(
    resources: Resources, result: Result, failure: Failure
) -> None:
    job_id = await accept(resources)
    async with working(resources, ScriptedExecutor(result)):
        await until(resources, job_id, JobState.FAILED)
    assert (await job_of(resources, job_id)).failure == failure


@pytest.mark.slow
async def test_a_run_out_of_memory_is_tried_again(resources: Resources, redis_db: redis.Redis) -> None:
    job_id = await accept(resources)
    async with working(resources, ScriptedExecutor(TOO_LARGE)):
        await until(resources, job_id, JobState.COMPLETED, attempt=2)
    assert (await job_of(resources, job_id)).unread == (7, 0), "what its runs say of its texts is in its record"
    assert audit(redis_db, max_attempts=5) == []


@pytest.mark.slow
async def test_an_error_at_the_start_is_logged_with_the_job_and_tried_again(
    resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    executor = ScriptedExecutor()
    executor.start_errors = [RuntimeError("no such kernel")]
    job_id = await accept(resources)
    async with working(resources, executor):
        await until(resources, job_id, JobState.COMPLETED, attempt=2)
    (logged,) = [record for record in caplog.records if "raised" in record.message]
    assert job_id in logged.message


async def test_a_claim_that_cannot_start_fails_as_its_executor_says(resources: Resources) -> None:
    executor = ScriptedExecutor()
    executor.start_errors = [RunFailed(BROKEN, retry=False)]
    job_id = await accept(resources)
    async with working(resources, executor):
        await until(resources, job_id, JobState.FAILED)
    assert (await job_of(resources, job_id)).failure == BROKEN


async def test_a_job_whose_base_model_is_not_loaded_waits_for_another_worker(
    resources: Resources, redis_db: redis.Redis
) -> None:
    """So none is lost while a base model moves to another group, whose generators restart."""
    executor = ScriptedExecutor()
    executor.start_errors = [NotLoaded("base model sdxl is not loaded here")]
    job_id = await accept(resources)
    async with working(resources, executor):
        await until(resources, job_id, JobState.QUEUED)
        assert redis_db.hget(redis_key("job", job_id), "tries") == "0", "that was no attempt of its own"
        redis_db.zadd(redis_key("delay", "generation"), {job_id: 1}, xx=True)
        await until(resources, job_id, JobState.COMPLETED, attempt=2)
    assert redis_db.hget(redis_key("count"), "requeued") == "1"


@pytest.mark.slow
async def test_a_storage_that_is_down_for_a_whole_lease_costs_the_attempt_and_not_the_job(
    settings: Settings, redis_db: redis.Redis
) -> None:
    blocked = settings.data_dir / "images"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the folder should be")
    async with open_resources(settings.model_copy(update={"lease": timedelta(seconds=0.2)})) as resources:
        job_id = await accept(resources)
        async with working(resources, ScriptedExecutor()):

            async def is_given_up() -> bool:
                return (await resources.queue_stats.counts()).get("requeued", 0) > 0

            await wait_until(is_given_up)
            blocked.unlink()

            async def is_completed() -> bool:
                return (await job_of(resources, job_id)).state is JobState.COMPLETED

            await wait_until(is_completed)
    assert audit(redis_db, max_attempts=5) == []


@pytest.mark.script_text
@pytest.mark.parametrize("results", [("image", "hang"), ("image", "image")], ids=["running", "at the commit"])
async def test_a_job_whose_account_may_no_longer_use_its_adapter_fails_and_leaves_no_images(
    resources: Resources, redis_db: redis.Redis, results: tuple[Result, ...]
) -> None:
    executor = ScriptedExecutor(*results)
    job_id = await accept(resources, images=2, lora_id=NEON)
    is_committed = "hang" not in results
    deny = f"redis.call('HSET', K('grants:' .. job.account), '{NEON}', 'deny')\n"
    asked = "if not keeps_adapters(job) then\n"
    stores = with_queue(resources, replacing("jobs/finish", asked, deny + asked)) if is_committed else resources
    async with working(stores, executor):
        if not is_committed:
            await wait_until(lambda: _stored(resources))
            await resources.adapter_grants.revoke(NEON, ACCOUNT)
        await until(resources, job_id, JobState.FAILED)
        await wait_until(lambda: not _stored(resources))
    assert (await failure_of(resources, job_id)).code is FailureCode.LORA_UNAVAILABLE
    assert len(executor.aborted) == (0 if is_committed else 1)
    assert audit(redis_db, max_attempts=5) == []


@pytest.mark.script_text
async def test_a_commit_that_is_not_answered_is_made_again_and_keeps_its_images(resources: Resources) -> None:
    losing = replacing("jobs/finish", "return 'ok'", "return redis.error_reply('TRYAGAIN the reply is lost')")
    job_id = await accept(resources)
    async with working(with_queue(resources, losing), ScriptedExecutor("image")):
        await until(resources, job_id, JobState.COMPLETED, attempt=1)
    assert len(_stored(resources)) == 1


async def test_a_canceled_job_leaves_neither_runs_nor_images(resources: Resources) -> None:
    executor = ScriptedExecutor("image", "hang")
    job_id = await accept(resources, images=2)
    async with working(resources, executor):
        await wait_until(lambda: _stored(resources))
        await wait_until(lambda: _is_at(resources, job_id, 75))  # one image is done, the other half
        await resources.queue.cancel(job_id, account_id=None)
        await until(resources, job_id, JobState.CANCELED)
        await wait_until(lambda: not _stored(resources))
    assert executor.aborted == [f"{job_id}.1.1"]


@pytest.mark.slow
async def test_an_image_that_cannot_be_deleted_is_left_to_the_sweeper(
    resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await accept(resources, images=2)
    async with working(resources, ScriptedExecutor("image", "hang")):
        await wait_until(lambda: _stored(resources))
        (image,) = _stored(resources)
        image.unlink()
        image.mkdir()  # what is not a file cannot be deleted as one
        await resources.queue.cancel(job_id, account_id=None)
        await until(resources, job_id, JobState.CANCELED)
        await wait_until(lambda: any("left to the sweeper" in record.message for record in caplog.records))
    image.rmdir()


@pytest.mark.script_text
async def test_heartbeats_go_in_one_call_which_is_sent_again_without_an_answer(
    resources: Resources, redis_db: redis.Redis
) -> None:
    together = "redis.call('HSET', K('count'), 'together', #attempts / 3)\n"
    full = "if redis.call('INCR', K('job_sequence')) < 6 then return redis.error_reply('OOM command not allowed') end\n"
    start = "local answer = {revision}\n"
    refusing = with_queue(resources, replacing("jobs/heartbeat", start, together + full + start))
    job_ids = [await accept(resources) for _ in range(3)]
    async with working(refusing, ScriptedExecutor("hang", "hang", "hang")):
        for job_id in job_ids:
            await wait_until(partial(_is_at, resources, job_id, 50))
            assert (await job_of(resources, job_id)).attempt == 1
        assert redis_db.hget(redis_key("count"), "together") == "3"
    for job_id in job_ids:
        await resources.queue.cancel(job_id, account_id=None)
    assert audit(redis_db, max_attempts=5) == []


async def test_an_attempt_that_lost_its_lease_writes_nothing_more(resources: Resources, redis_db: redis.Redis) -> None:
    executor = ScriptedExecutor("image", "hang")
    job_id = await accept(resources, images=2)
    async with working(resources, executor):
        await wait_until(lambda: _stored(resources))
        redis_db.hset(redis_key("job", job_id), "attempt", "7")  # as when another worker has claimed it
        await wait_until(lambda: executor.aborted)
        await wait_until(lambda: not _stored(resources))
    assert (await job_of(resources, job_id)).state is JobState.RUNNING


@pytest.mark.script_text
async def test_an_attempt_that_breaks_is_left_to_its_lease(
    settings: Settings, redis_db: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Here by an answer that no script of this version gives."""
    once = "if redis.call('HINCRBY', K('job:' .. id), 'nonsense', 1) == 1 then return 'nonsense' end\n"
    end = "if field[6] then return 'cancel' end"
    nonsense = replacing("jobs/heartbeat", end, once + end)
    async with open_resources(settings.model_copy(update={"lease": timedelta(seconds=0.3)})) as resources:
        job_id, executor = await accept(resources), ScriptedExecutor("hang")
        async with working(with_queue(resources, nonsense), executor) as worker:
            await wait_until(lambda: f"job {job_id}: left to its lease" in caplog.text)
            await wait_until(lambda: len(executor.aborted) == 1)
            assert worker.open_jobs == 0
            assert (await job_of(resources, job_id)).state is JobState.RUNNING

            async def is_reaped() -> bool:
                return await resources.queue.reap() > 0

            await wait_until(is_reaped)
            await until(resources, job_id, JobState.COMPLETED, attempt=2)


async def test_a_store_is_called_until_it_answers_or_the_time_is_over() -> None:
    failures = [StoreUnavailable("down"), StoreUnavailable("down")]

    async def ask() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert await retry_until_available(ask) == "answer"
    failures += [StoreUnavailable("down")] * 1000
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(retry_until_available(ask, within=timedelta(seconds=0.2)), SOON.total_seconds())
