"""`DELETE /v1/jobs/…` removes a job from Redis, from storage and from both interfaces."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from serve_app.domain.audit import Act
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.domain.requests import Variant
from serve_app.jobs.deletion import Deletions
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from serve_app.store.script import Script
from tests.api.app import BODY_A, Member, TestService, refused
from tests.audit import Reading, audit
from tests.support import existing, plain_redis

PROMPT = "a lighthouse that nobody else asked for"


@pytest.fixture
def server(service: TestService) -> Iterator[redis.Redis]:
    with plain_redis(service.resources.redis_url) as client:
        yield client


async def delete(service: TestService, headers: dict[str, str], path: str) -> httpx.Response:
    return await service.client.delete(f"/v1/jobs/{path}", headers=headers)


def mentions(server: redis.Redis, text: str) -> list[str]:
    """Return the keys that hold the text, in their names or values.

    Left out are the audit log, the list of objects to look for once more, and what a worker was last given, which goes
    with its lease.
    """
    reading: Any = Reading(server)
    found = [
        name for name in reading.types if text in name or any(text in str(value) for value in reading._values[name])
    ]
    return [name for name in found if name != redis_key("deletions") and not name.startswith(redis_key("claim", ""))]


def objects(service: TestService, job_id: str) -> list[Path]:
    return [path for path in (service.resources.settings.data_dir / "images").rglob("*") if job_id in str(path)]


@pytest.mark.parametrize("made_on", Variant)
@pytest.mark.parametrize("asked_with", Variant)
async def test_a_deleted_job_was_never_there(
    service: TestService, server: redis.Redis, member: Member, made_on: Variant, asked_with: Variant
) -> None:
    field = "prompt" if made_on is Variant.A else "positive_prompt"
    job_id = await service.submit(member, made_on, **{field: PROMPT})
    job = await service.complete(job_id)
    record = (await service.client.get(f"/v1/jobs/{job_id}", headers=member.a)).json()
    url = record["images"][0]["url"]
    assert (await service.client.get(url)).status_code == 200
    assert objects(service, job_id)
    problems = audit(server, max_attempts=5)
    answer = await delete(service, member.headers(asked_with), job_id)
    assert (answer.status_code, answer.content) == (204, b"")
    assert set(audit(server, max_attempts=5)) <= set(problems), "the totals are right"
    for path, headers in (
        (f"/v1/generate/{job_id}", member.a),
        (f"/v1/generations/{job_id}", member.b),
        (f"/v1/jobs/{job_id}", member.a),
    ):
        gone = await service.client.get(path, headers=headers)
        never = await service.client.get(path[:-26] + "a" * 26, headers=headers)
        assert (gone.status_code, gone.content) == (404, never.content)
    assert (await service.client.get(url)).status_code == 404
    assert (await service.client.get("/v1/jobs", headers=member.b)).json() == {"jobs": []}
    source = {"image_id": job.images[0].image_id}
    assert (await service.client.post("/v1/upscale", json=source, headers=member.a)).status_code == 404
    assert objects(service, job_id) == []
    assert mentions(server, PROMPT) == []
    assert mentions(server, job.images[0].image_id) == []
    assert mentions(server, job_id) == []
    again = await delete(service, member.headers(asked_with), job_id)
    refused(again, 404, "not_found")


async def test_failed_and_canceled_jobs_go_from_the_operator_s_lists_too(
    service: TestService, server: redis.Redis, member: Member
) -> None:
    canceled = await service.submit(member)
    await service.resources.queue.cancel(canceled, account_id=member.account.id)
    failed = await service.submit(member)
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="broken")
    await service.resources.queue.fail(await service.lease(failed), failure, retry=False)
    for job_id in (failed, canceled):
        assert (await delete(service, member.a, job_id)).status_code == 204
        assert mentions(server, job_id) == []


@pytest.mark.parametrize("is_running", [False, True], ids=["waiting", "running"])
async def test_an_unfinished_job_is_canceled_first(service: TestService, member: Member, is_running: bool) -> None:
    job_id = await service.submit(member)
    if is_running:
        await service.run(job_id, 40)
    answer = await delete(service, member.a, job_id)
    refused(answer, 409, "job_unfinished", "cancel")
    assert (await service.client.get(f"/v1/jobs/{job_id}", headers=member.a)).status_code == 200
    if not is_running:
        await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=member.a)
        assert (await delete(service, member.a, job_id)).status_code == 204


async def test_another_account_deletes_nothing(service: TestService, member: Member) -> None:
    other, job = await service.member(), await service.complete(await service.submit(member))
    paths = [job.id, "gen_" + "a" * 26, "nonsense", f"{job.id}/images/{job.images[0].image_id}"]
    answers = [await delete(service, other.a, path) for path in paths]
    assert [answer.status_code for answer in answers] == [404] * 4
    assert len({answer.content for answer in answers}) == 1
    answer = await service.client.get(f"/v1/jobs/{job.id}", headers=member.a)
    assert (await service.client.get(answer.json()["images"][0]["url"])).status_code == 200
    assert await service.resources.audit.rows(other.account.id) == []


async def test_a_deletion_is_counted_and_recorded_once(service: TestService) -> None:
    member = await service.member(plan_a="basic")
    job = await service.complete(await service.submit(member))
    answer = await delete(service, member.a, job.id)
    assert answer.headers["x-ratelimit-remaining"] == "48"
    [key] = await service.resources.api_keys.list(member.account.id)
    [row] = await service.resources.audit.rows(member.account.id)
    assert (row.act, row.actor, row.subject, row.address) == (Act.JOB_DELETED, f"key:{key.id}", job.id, "127.0.0.1")


async def test_an_idempotency_key_of_a_deleted_job_starts_a_new_one(
    service: TestService, server: redis.Redis, member: Member
) -> None:
    headers = member.a | {"Idempotency-Key": "once"}
    first = (await service.client.post("/v1/generate", json=BODY_A, headers=headers)).json()["request_id"]
    await service.complete(first)
    assert (await delete(service, member.a, first)).status_code == 204
    assert mentions(server, first) == []
    answer = await service.client.post("/v1/generate", json=BODY_A | {"seed": 3}, headers=headers)
    assert answer.status_code == 202
    assert answer.json()["request_id"] != first


async def test_one_image_is_deleted_and_the_others_keep_their_seeds(
    service: TestService, server: redis.Redis, member: Member
) -> None:
    job = await service.complete(await service.submit(member, num_images=3, seed=7))
    before = (await service.client.get(f"/v1/jobs/{job.id}", headers=member.a)).json()["images"]
    image = before[1]
    assert (await delete(service, member.b, f"{job.id}/images/{image['image_id']}")).status_code == 204
    after = (await service.client.get(f"/v1/jobs/{job.id}", headers=member.a)).json()["images"]
    kept = [before[0], before[2]]
    assert [(row["image_id"], row["seed"]) for row in after] == [(row["image_id"], row["seed"]) for row in kept]
    assert [row["seed"] for row in after] == ["7", "9"]
    record = (await service.client.get(f"/v1/generate/{job.id}", headers=member.a)).json()
    assert [row["image_id"] for row in record["images"]] == [row["image_id"] for row in kept]
    assert (await service.client.get(image["url"])).status_code == 404
    assert [(await service.client.get(row["url"])).status_code for row in kept] == [200, 200]
    assert mentions(server, image["image_id"]) == []
    assert (await delete(service, member.a, f"{job.id}/images/{image['image_id']}")).status_code == 404
    rows = await service.resources.audit.rows(member.account.id)
    assert [(row.act, row.subject) for row in rows] == [(Act.IMAGE_DELETED, image["image_id"])]


async def test_with_its_last_image_the_job_goes(service: TestService, server: redis.Redis, member: Member) -> None:
    job = await service.complete(await service.submit(member, Variant.B))
    assert (await delete(service, member.a, f"{job.id}/images/{job.images[0].image_id}")).status_code == 204
    assert (await service.client.get(f"/v1/generations/{job.id}", headers=member.b)).status_code == 404
    assert objects(service, job.id) == []
    assert mentions(server, job.id) == []


async def test_a_script_that_is_sent_twice_answers_the_same(service: TestService, member: Member) -> None:
    """A script is sent again when the reply to the first is lost on its way."""
    deletions = Deletions(connect(service.resources.redis_url), service.resources.images)
    for name in ("_delete_image", "_delete_job"):
        setattr(deletions, name, _sent_twice(getattr(deletions, name)))
    job = await service.complete(await service.submit(member, num_images=2))
    image = existing(await deletions.delete_image(job.id, job.images[0].image_id, account_id=None))
    assert image.name == job.images[0].image_id
    whole = existing(await deletions.delete_job(job.id, account_id=None))
    assert whole.name == job.id
    assert await deletions.delete_job(job.id, account_id=None) is None


def _sent_twice(script: Script) -> Callable[..., Awaitable[str]]:
    async def send(**args: Any) -> str:
        first, again = await script(**args), await script(**args)
        assert first == again
        return again

    return send
