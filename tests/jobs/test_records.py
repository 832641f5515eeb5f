"""Damaged records and records of other versions are read as far as possible, and fail alone."""

from typing import Any

import pytest
from pydantic_core import to_json

from serve_app.domain.errors import FailureCode, UnreadableRecord
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.jobs.compact_form import deflate, request_bytes
from serve_app.jobs.queue import new_nonce
from serve_app.store.keys import redis_key
from tests.audit import audit
from tests.composition import Resources
from tests.made_jobs import ACCOUNT, accept, claim, complete, failure_of, job_of
from tests.rewriting import replacing
from tests.worker.scripted_executor import with_queue

REQUEST = GenerationRequest(prompt="a boat", loras=(LoraUse("model_x"),), seeds=(7,))


NEWER_ACCEPT = replacing("jobs/accept", "version = version", "version = 99, priority = 'high'")
"""A later version's accept: its records have a higher version and one field more."""


NEXT_REQUEST = {"prompt": "a boat", "loras": [{"id": "model_x", "mask": ""}], "seeds": [7], "tiles": 2}
"""The request as a later version of the code might have it."""


def _damage(redis_db: Any, job_id: str, **fields: Any) -> None:
    redis_db.hset(redis_key("job", job_id), mapping=fields)


def _replace_request(redis_db: Any, job_id: str, request: Any) -> None:
    """Give the record a request as another version writes it, and count its bytes as its accept would."""
    (packed,), before = _request(request).values(), request_bytes(redis_db.hgetall(redis_key("job", job_id)))
    _damage(redis_db, job_id, **{"0": packed})
    stored = redis_key("stored", ACCOUNT, Variant.A)
    (day,) = redis_db.hkeys(stored)
    redis_db.hincrby(stored, day, len(packed) - before)


async def test_a_record_of_a_newer_version_goes_from_accept_to_images(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(with_queue(resources, NEWER_ACCEPT), request=REQUEST)
    assert redis_db.hget(redis_key("job", job_id), "version") == "99"
    _replace_request(redis_db, job_id, NEXT_REQUEST)
    (claimed,) = await claim(resources)
    assert claimed.request == REQUEST
    await resources.queue.finish(claimed.lease, [], seconds=1)
    assert [(job.id, job.request) for job in await resources.job_history.list(ACCOUNT)] == [(job_id, REQUEST)]
    assert audit(redis_db, max_attempts=5) == []


@pytest.mark.parametrize(("damage", "is_known"), [({"r0": "[{"}, True), ({"r0": "fast", "created": "today"}, False)])
async def test_a_damaged_result_keeps_nobody_from_deleting_the_job_and_what_is_known_of_its_folder(
    resources: Resources, redis_db: Any, damage: dict[str, str], is_known: bool
) -> None:
    job_id, _ = await complete(resources)
    _damage(redis_db, job_id, **damage)
    with pytest.raises(UnreadableRecord):
        await resources.jobs.find(job_id)
    assert await resources.deletions.delete_job(job_id, account_id=ACCOUNT) is not None
    ((name, folder, image_uris),) = [
        (each.name, each.folder, each.image_uris) for each in await resources.deletions.listed()
    ]
    assert (name, job_id in folder, bool(folder), image_uris) == (job_id, is_known, is_known, [])
    assert not redis_db.exists(redis_key("job", job_id))


async def test_a_failure_of_a_newer_kind_reads_as_the_general_one(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(resources)
    _damage(redis_db, job_id, code="solar_flare", message="The sun did it.")
    failure = await failure_of(resources, job_id)
    assert (failure.code, failure.message) == (FailureCode.GENERATION_FAILED, "The sun did it.")


def _request(request: Any) -> dict[str, Any]:
    """The fields of a record with a request that this version does not write."""
    return {"0": deflate(to_json(request), "")}


DAMAGES: dict[str, dict[str, Any]] = {
    "not deflated": {"0": "{}"},
    "no object": _request("a bo"),
    "a field less": _request({"prompt": "a boat"}),
    "a field of another type": _request({"prompt": "a boat", "loras": ["model_x"], "seeds": [7]}),
    "created": {"created": "yesterday"},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_a_damaged_job_fails_alone_and_by_name(
    resources: Resources, redis_db: Any, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = await accept(resources), await accept(resources)
    _damage(redis_db, damaged, **damage)
    claims = await claim(resources, limit=4)
    assert [each.lease.job_id for each in claims] == [whole]
    assert redis_db.hget(redis_key("job", damaged), "state") == JobState.FAILED
    (logged,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert damaged in logged
    assert "attempt 1" in logged
    assert "a bo" not in logged, "a prompt is never logged"
    await resources.queue.finish(claims[0].lease, [], seconds=1)
    assert await resources.queue_stats.counts() == {"accepted": 2, "failed": 1, "completed": 1}


async def test_a_caller_reads_why_a_damaged_job_failed(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(resources)
    _damage(redis_db, job_id, **_request({}))
    assert not await claim(resources)
    for job in (await resources.jobs.get(job_id, account_id=ACCOUNT), *await resources.dead_letters.list()):
        assert job is not None
        assert (job.id, job.state, job.request) == (job_id, JobState.FAILED, None)
        assert job.failure is not None
        assert "cannot be read by this version" in job.failure.message
    assert audit(redis_db, max_attempts=5) == []


async def test_a_newer_job_that_cannot_be_read_is_left_to_a_newer_worker(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(with_queue(resources, NEWER_ACCEPT))
    _damage(redis_db, job_id, **_request({"prompt": "a boat", "loras": ["model_x"], "seeds": [7]}))
    tries = resources.settings.max_attempts + 1
    for _ in range(tries):
        assert not await claim(resources)
        redis_db.zadd(redis_key("delay", "generation"), {job_id: 1}, xx=True)  # its pause is over
    job = await job_of(resources, job_id)
    assert (job.state, job.attempt, job.failure) == (JobState.QUEUED, tries, None)
    assert (await resources.queue_stats.backlog(JobKind.GENERATION)).delayed == 1
    assert audit(redis_db, max_attempts=5) == []


@pytest.mark.parametrize("field", ["kind", "state", "variant"])
async def test_a_record_of_an_unknown_sort_is_left_out_of_lists_and_refused_alone(
    resources: Resources, redis_db: Any, field: str
) -> None:
    future, known = await accept(resources), await accept(resources)
    _damage(redis_db, future, **{field: "future"})
    for jobs in (await resources.job_history.list(ACCOUNT), await resources.job_history.list_all()):
        assert [job.id for job in jobs] == [known]
    assert (await resources.jobs.find_many([future, known])).keys() == {known}
    with pytest.raises(UnreadableRecord):
        await resources.jobs.get(future, account_id=ACCOUNT)
    assert any("cannot be read" in problem for problem in audit(redis_db, max_attempts=5))


async def test_an_unreadable_record_is_polled_again_not_reported_as_a_defect(
    resources: Resources, redis_db: Any
) -> None:
    account = await resources.accounts.create("acme")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    job_id = await accept(resources)
    _damage(redis_db, job_id, account=account.id, state="future")
    with pytest.raises(UnreadableRecord, match="cannot be read by this version"):
        await resources.poller.poll(secret, Variant.A, job_id, of=None)


async def test_a_claim_asked_again_fails_its_unreadable_job_once(resources: Resources, redis_db: Any) -> None:
    job_id = await accept(resources)
    _damage(redis_db, job_id, **_request({}))
    nonce = new_nonce()
    for _ in range(2):
        assert await resources.queue.claim("w", pool=JobKind.GENERATION, nonce=nonce) == []
    assert (await resources.queue_stats.counts())["failed"] == 1
    assert [job.attempt for job in await resources.dead_letters.list()] == [1]
