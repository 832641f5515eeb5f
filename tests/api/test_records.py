"""A job's record has exactly the contract's fields in each state, and its status never goes back."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from tests.api.app import POLL_PATH, Member, TestService
from tests.support import plain_redis, png_of

A, B = Variant.A, Variant.B
NAME = "[a-z2-7]{26}"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


async def poll(service: TestService, member: Member, variant: Variant, job_id: str, path: str = "") -> dict[str, Any]:
    path = path or POLL_PATH[variant]
    answer = await service.client.get(path + job_id, headers=member.headers(variant))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "private, no-cache"
    return answer.json()


def moment(text: str) -> datetime:
    assert TIME.fullmatch(text), text
    return datetime.fromisoformat(text)


def not_past(text: str, asked: datetime) -> None:
    assert moment(text) >= asked


async def test_both_acknowledge_by_their_own_fields_and_headers(service: TestService, member: Member) -> None:
    asked, image_id = datetime.now(UTC), await service.completed_image(member)
    upscale = await service.client.post("/v1/upscale", json={"image_id": image_id}, headers=member.a)
    for answer, prefix in ((await service.generate(member, A), "gen"), (upscale, "up")):
        body = answer.json()
        assert (answer.status_code, set(body)) == (202, {"request_id", "status", "estimated_completion_time"})
        assert re.fullmatch(f"{prefix}_{NAME}", body["request_id"])
        assert body["status"] == "processing"
        not_past(body["estimated_completion_time"], asked)
        assert answer.headers["location"] == f"/v1/generate/{body['request_id']}"
        assert (answer.headers["retry-after"], answer.headers["cache-control"]) == ("5", "no-store")
        assert "idempotency-replayed" not in answer.headers
    answer = await service.generate(member, B)
    body = answer.json()
    assert (answer.status_code, set(body)) == (200, {"run_id", "status", "estimated_time"})
    assert re.fullmatch(f"gen_{NAME}", body["run_id"])
    assert (body["status"], type(body["estimated_time"])) == ("queued", int)
    assert body["estimated_time"] >= 1
    assert answer.headers["location"] == f"/v1/generations/{body['run_id']}"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("progress", [0, 43], ids=["waiting", "running"])
async def test_an_unfinished_job_shows_its_progress(service: TestService, member: Member, progress: int) -> None:
    request, run = await service.submit(member), await service.submit(member, B)
    if progress:
        await service.run(request, progress)
        await service.run(run, progress)
    asked = datetime.now(UTC)
    body = await poll(service, member, A, request)
    not_past(body.pop("estimated_completion_time"), asked)
    assert body == {"request_id": request, "status": "processing", "progress": progress}
    status = "processing" if progress else "queued"
    assert await poll(service, member, B, run) == {"run_id": run, "status": status, "progress": progress}


async def test_a_run_that_lost_its_worker_is_not_queued_again(service: TestService, member: Member) -> None:
    job_id = await service.submit(member, B)
    lease = await service.run(job_id, 43)
    await service.resources.queue.release(lease)
    assert await poll(service, member, B, job_id) == {"run_id": job_id, "status": "processing", "progress": 43}


@pytest.mark.parametrize("variant", Variant)
async def test_progress_never_falls_and_stays_below_100(service: TestService, member: Member, variant: Variant) -> None:
    job_id = await service.submit(member, variant)
    seen: list[int] = []
    for reported in (0, 10, 55, 30, 55, 100, 120, 5):
        await service.run(job_id, reported)
        progress = (await poll(service, member, variant, job_id))["progress"]
        assert type(progress) is int
        seen.append(progress)
    assert seen == sorted(seen)
    assert seen[-1] == 99


async def test_a_completed_request_shows_its_images(service: TestService, member: Member) -> None:
    job_id = await service.submit(member, width=512, height=768, num_images=4)
    await service.complete(job_id)
    body = await poll(service, member, A, job_id)
    assert set(body) == {"request_id", "status", "images", "completed_at"}
    assert (body["request_id"], body["status"]) == (job_id, "completed")
    assert abs(moment(body["completed_at"]) - datetime.now(UTC)) < timedelta(seconds=30)
    assert len(body["images"]) == 4
    assert len({image["image_id"] for image in body["images"]}) == 4
    for image in body["images"]:
        assert set(image) == {"image_id", "url", "width", "height"}
        assert re.fullmatch(f"img_{NAME}", image["image_id"])
        assert (image["width"], image["height"]) == (512, 768)
        await opens_as_png(service, image["url"], (512, 768))


async def test_a_completed_run_shows_its_image(service: TestService, member: Member) -> None:
    job_id = await service.submit(member, B, width=264, height=1024)
    await service.complete(job_id)
    body = await poll(service, member, B, job_id)
    assert set(body) == {"run_id", "status", "progress", "image_url"}
    assert (body["run_id"], body["status"], body["progress"]) == (job_id, "completed", 100)
    await opens_as_png(service, body["image_url"], (264, 1024))


async def opens_as_png(service: TestService, url: str, size: tuple[int, int]) -> None:
    """Open the image without a key."""
    answer = await service.client.get(url)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/png"
    assert answer.content == png_of(size)


@pytest.mark.parametrize("path", ["/v1/generate/", "/v1/upscale/"])
@pytest.mark.parametrize("factor", [2, 4])
async def test_an_upscale_is_polled_like_a_generation(
    service: TestService, member: Member, path: str, factor: int
) -> None:
    image_id = await service.completed_image(member)
    body = {"image_id": image_id, "scale_factor": factor}
    job_id = (await service.client.post("/v1/upscale", json=body, headers=member.a)).json()["request_id"]
    with plain_redis(service.resources.redis_url) as server:  # it has waited for five minutes, and no other runs
        server.hincrby(redis_key("job", job_id), "waiting_since", -300_000)
        server.hset(redis_key("load", "upscale"), "work", 0)
    waiting = await poll(service, member, A, job_id, path)
    assert set(waiting) == {"request_id", "status", "progress", "estimated_completion_time"}
    assert moment(waiting["estimated_completion_time"]) > datetime.now(UTC) + timedelta(minutes=4)
    await service.run(job_id, 60)
    assert (await poll(service, member, A, job_id, path))["progress"] == 60
    await service.complete(job_id)
    done = await poll(service, member, A, job_id, path)
    assert set(done) == {"request_id", "status", "images", "completed_at"}
    (image,) = done["images"]
    assert image["image_id"] != image_id
    assert (image["width"], image["height"]) == (512 * factor, 512 * factor)


async def test_a_generation_can_be_polled_under_the_alias(service: TestService, member: Member) -> None:
    job_id = await service.submit(member)
    assert (await poll(service, member, A, job_id, "/v1/upscale/"))["request_id"] == job_id


ENDED_FIELDS = {A: {"request_id", "status", "error"}, B: {"run_id", "status", "progress", "error"}}


@pytest.mark.parametrize("variant", Variant)
async def test_a_job_that_ended_without_images_names_its_reason(
    service: TestService, member: Member, variant: Variant
) -> None:
    for code in FailureCode:
        job_id = await service.submit(member, variant)
        lease = await service.run(job_id, 43)
        await service.resources.queue.fail(lease, Failure(code=code, message="It did not work."), retry=False)
        body = await poll(service, member, variant, job_id)
        assert (set(body), body["status"]) == (ENDED_FIELDS[variant], "failed")
        assert body["error"] == {"code": code, "message": "It did not work."}
        assert body.get("progress", 43) == 43
    canceled = await service.submit(member, variant)
    await service.resources.queue.cancel(canceled, account_id=member.account.id)
    body = await poll(service, member, variant, canceled)
    assert (set(body), body["status"]) == (ENDED_FIELDS[variant], "failed")
    assert (set(body["error"]), body["error"]["code"]) == ({"code", "message"}, "canceled")


@pytest.mark.parametrize("variant", Variant)
async def test_a_retried_job_never_shows_failed_in_between(
    service: TestService, member: Member, variant: Variant
) -> None:
    job_id = await service.submit(member, variant)
    lease = await service.run(job_id, 43)
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="Once more.")
    await service.resources.queue.fail(lease, failure, retry=True)
    body = await poll(service, member, variant, job_id)
    assert body["status"] == "processing"
    assert body["progress"] == 43
    assert "error" not in body


@pytest.mark.parametrize("variant", Variant)
async def test_a_poll_says_when_to_ask_again_until_the_job_has_ended(
    service: TestService, member: Member, variant: Variant
) -> None:
    job_id = await service.submit(member, variant)
    assert (await service.poll(member, variant, job_id)).headers["retry-after"] == "5"
    await service.complete(job_id)
    assert "retry-after" not in (await service.poll(member, variant, job_id)).headers


async def test_an_estimate_is_recomputed_and_never_in_the_past(service: TestService, member: Member) -> None:
    job_id = await service.submit(member, num_images=4, steps=50, width=768, height=768)
    first = moment((await poll(service, member, A, job_id))["estimated_completion_time"])
    await service.run(job_id, 99)
    asked = datetime.now(UTC)
    later = await poll(service, member, A, job_id)
    not_past(later["estimated_completion_time"], asked)
    assert moment(later["estimated_completion_time"]) < first


async def test_models_are_listed_with_four_fields_each_and_can_be_used_on_both_interfaces(
    service: TestService, member: Member
) -> None:
    answer = await service.client.get("/v1/models", headers=member.b)
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"models"}
    assert len(body["models"]) == 8
    for model in body["models"]:
        assert set(model) == {"id", "name", "description", "created_at"}
        assert re.fullmatch(f"model_{NAME}", model["id"])
        moment(model["created_at"])
        await service.submit(member, A, lora_id=model["id"])
        await service.submit(member, B, model_id=model["id"])


async def test_a_job_whose_request_only_a_newer_version_can_read_is_shown_without_it(
    service: TestService, member: Member
) -> None:
    job_id = await service.submit(member)
    with plain_redis(service.resources.redis_url) as server:
        server.hset(redis_key("job", job_id), "0", "{}")
    record = await poll(service, member, A, job_id, "/v1/jobs/")
    assert record["status"] == "queued"
    assert "request" not in record
