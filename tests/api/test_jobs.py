"""`/v1/jobs` serves the owner's jobs alone, with real states and either credential.

Nothing of it changes the two interfaces.
"""

import asyncio
from typing import Any

import httpx
import pytest

from serve_app.api.jobs.records import Job
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from tests.api.app import BODY_A, LORA, Member, TestService, error_of, refused
from tests.support import plain_redis

A, B = Variant.A, Variant.B
ALWAYS = {"id", "kind", "interface", "status", "progress", "attempt", "created_at", "request"}
OF_ANY_JOB = {"output_format": "png", "priority": "normal", "metadata": {}}


async def show(service: TestService, headers: dict[str, str], job_id: str) -> dict[str, Any]:
    """Read a job; the answer is the documented model's own JSON."""
    answer = await service.client.get(f"/v1/jobs/{job_id}", headers=headers)
    assert answer.status_code == 200, answer.text
    assert Job.model_validate_json(answer.content).model_dump_json(exclude_none=True) == answer.text
    return answer.json()


@pytest.mark.parametrize("made_on", Variant)
@pytest.mark.parametrize("asked_with", Variant)
async def test_either_credential_shows_a_job_of_either_interface(
    service: TestService, member: Member, made_on: Variant, asked_with: Variant
) -> None:
    job_id = await service.submit(member, made_on, seed=7)
    body = await show(service, member.headers(asked_with), job_id)
    assert set(body) == ALWAYS | {"jobs_ahead", "estimated_completion_time"}
    assert (body["id"], body["kind"], body["interface"]) == (job_id, "generation", made_on)
    assert (body["status"], body["progress"], body["attempt"]) == ("queued", 0, 0)
    assert body["request"] == {
        "prompt": "a lighthouse",
        "negative_prompt": "",
        "loras": [{"id": LORA, "weight": 0.75}],
        "width": 512,
        "height": 512,
        "guidance_scale": 7.5,
        "steps": 30,
        "num_images": 1,
        "seeds": ["7"],
        "prompt_weights": False,
        "embed_settings": False,
        **OF_ANY_JOB,
    }


async def test_a_job_shows_its_real_states(service: TestService, member: Member) -> None:
    job_id = await service.submit(member, num_images=2, seed=2**64 - 1)
    lease = await service.run(job_id, 43)
    running = await show(service, member.a, job_id)
    assert set(running) == ALWAYS | {"started_at", "estimated_completion_time"}
    assert (running["status"], running["progress"], running["attempt"]) == ("running", 43, 1)
    await service.complete(job_id)
    done = await show(service, member.a, job_id)
    assert set(done) == ALWAYS | {"started_at", "finished_at", "images", "usage"}
    assert (done["status"], done["progress"]) == ("completed", 100)
    keys = {"image_id", "url", "width", "height", "size_bytes", "sha256", "seed", "seed_number"}
    assert [set(image) for image in done["images"]] == [keys, keys]
    assert done["images"][0]["seed"] == str(2**64 - 1)
    assert lease.attempt == 1


async def test_a_failed_job_shows_why(service: TestService, member: Member) -> None:
    job_id = await service.submit(member)
    failure = Failure(code=FailureCode.OUT_OF_MEMORY, message="Too large.")
    await service.resources.queue.fail(await service.lease(job_id), failure, retry=False)
    body = await show(service, member.b, job_id)
    assert set(body) == ALWAYS | {"started_at", "finished_at", "error"}
    assert (body["status"], body["error"]) == ("failed", {"code": "out_of_memory", "message": "Too large."})


async def test_an_upscale_is_a_job_too(service: TestService, member: Member) -> None:
    image_id = await service.completed_image(member)
    answer = await service.client.post("/v1/upscale", json={"image_id": image_id}, headers=member.a)
    job_id = answer.json()["request_id"]
    body = await show(service, member.b, job_id)
    assert (body["kind"], body["request"]) == ("upscale", {"image_id": image_id, "scale_factor": 2} | OF_ANY_JOB)
    await service.complete(job_id)
    (image,) = (await show(service, member.b, job_id))["images"]
    assert "seed" not in image


async def cancel(service: TestService, headers: dict[str, str], job_id: str) -> httpx.Response:
    return await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=headers)


@pytest.mark.parametrize("variant", Variant)
async def test_a_waiting_job_is_canceled_at_once_and_again_is_the_same(
    service: TestService, member: Member, variant: Variant
) -> None:
    job_id = await service.submit(member, variant)
    for _ in range(2):
        answer = await cancel(service, member.headers(variant), job_id)
        assert answer.status_code == 200
        assert answer.json()["status"] == "canceled"
        assert answer.json()["error"]["code"] == "canceled"
        assert answer.headers["cache-control"] == "no-store"


async def test_a_running_job_stops_at_its_next_heartbeat_and_a_finished_one_stays(
    service: TestService, member: Member
) -> None:
    job_id, finished = await service.submit(member), await service.submit(member)
    lease = await service.run(job_id, 10)
    assert (await cancel(service, member.a, job_id)).json()["status"] == "running"
    assert await service.resources.queue.heartbeat(lease, progress=11) == "cancel"
    await service.complete(finished)
    answer = await cancel(service, member.a, finished)
    assert (answer.status_code, answer.json()["status"]) == (200, "completed")


async def test_another_account_cancels_nothing(service: TestService, member: Member) -> None:
    other = await service.member()
    job_id = await service.submit(member)
    answers = [await cancel(service, other.a, name) for name in (job_id, "gen_" + "a" * 26, "nonsense")]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert len({answer.content for answer in answers}) == 1
    assert (await show(service, member.a, job_id))["status"] == "queued"


async def listing(service: TestService, member: Member, query: str = "") -> dict[str, Any]:
    answer = await service.client.get(f"/v1/jobs{query}", headers=member.b)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def pages(service: TestService, member: Member, *, limit: int) -> list[str]:
    """The ids on all pages."""
    seen: list[str] = []
    query = f"?limit={limit}"
    while query:
        page = await listing(service, member, query)
        assert len(page["jobs"]) <= limit
        seen += [job["id"] for job in page["jobs"]]
        query = f"?limit={limit}&cursor={page['next_cursor']}" if "next_cursor" in page else ""
    return seen


async def test_jobs_are_listed_newest_first_page_by_page(service: TestService, member: Member) -> None:
    made = [await service.submit(member, variant) for variant in (A, B, A, B, A)]
    assert [job["id"] for job in (await listing(service, member))["jobs"]] == made[::-1]
    assert await pages(service, member, limit=2) == made[::-1]


@pytest.mark.slow
async def test_jobs_of_one_millisecond_are_all_listed(service: TestService, member: Member) -> None:
    """Sixty jobs are submitted at once, so that some share their millisecond; no page boundary may lose one of these."""

    async def submit() -> str:
        while True:  # so many at once may be too much for a busy machine: ask again
            answer = await service.client.post("/v1/generate", json=BODY_A, headers=member.a)
            if answer.status_code != 503:
                return answer.json()["request_id"]

    made = set(await asyncio.gather(*(submit() for _ in range(60))))
    for limit in (1, 3, 7):
        seen = await pages(service, member, limit=limit)
        assert len(seen) == len(set(seen))
        assert set(seen) == made


async def test_a_page_with_a_job_that_is_gone_is_followed_by_the_rest(service: TestService, member: Member) -> None:
    """A job is gone when its retention is over; a record that this version cannot read is left out too."""
    made = [await service.submit(member) for _ in range(5)]
    expired, damaged = made[4], made[3]
    with plain_redis(service.resources.redis_url) as client:
        client.delete(redis_key("job", expired))
        client.hset(redis_key("job", damaged), "state", "paused")
    assert await pages(service, member, limit=2) == made[2::-1]


async def test_jobs_are_found_by_what_people_look_for(service: TestService, member: Member) -> None:
    first = await service.complete(await service.submit(member, num_images=2))
    asked = {"prompt": "a boat", "metadata": {"order": "47=11", "by": "ann"}}
    second, upscaled = [
        (await service.client.post("/v1/jobs", json=body, headers=member.a)).json()
        for body in (asked, {"kind": "upscale", "image_id": first.images[0].image_id, "metadata": {"by": "ann"}})
    ]
    at, ids = second["created_at"], {"a": first.id, "b": second["id"], "c": upscaled["id"]}
    for query, found in {
        "status=completed": "a",
        "status=queued&kind=generation": "b",
        "kind=upscale": "c",
        "base_model=pocket": "ba",
        "base_model=sdxl": "",
        f"lora_id={LORA}": "a",
        "metadata=by%3Dann": "cb",
        "metadata=by%3Dann&metadata=order%3D47%3D11": "b",
        "metadata=by%3Dan": "",
        f"created_after={at}&metadata=order%3D47%3D11&created_before=2999-01-01T00:00:00Z": "b",
        f"created_before={at[:4]}-01-01T00:00:00Z": "",
    }.items():
        assert [job["id"] for job in (await listing(service, member, f"?{query}"))["jobs"]] == [*map(ids.get, found)]


CLOSED = {
    "GET /v1/jobs?state=failed": "state: unknown query parameter; the parameters are limit, status, kind, base_model, ",
    "GET /v1/jobs/gen_x?fields=id": "fields: unknown query parameter; there are no parameters",
    "GET /v1/jobs/gen_x/events?since=1": "since: unknown query parameter; ",
    "POST /v1/jobs?fal_webhook=x": "fal_webhook: unknown query parameter; there are no parameters: send it in the body",
    "POST /v1/jobs/gen_x/cancel?force=1": "force: unknown query parameter; ",
    "DELETE /v1/jobs/gen_x?force=1": "force: unknown query parameter; ",
    "GET /v1/usage?from=1": "from: unknown query parameter; the parameters are days",
    "GET /v1/images?page=2": "page: unknown query parameter; the parameters are limit, cursor",
    "GET /v1/webhooks?limit=2": "limit: unknown query parameter; there are no parameters",
    "GET /v1/loras?metadata[a]=b": "metadata[a]: unknown query parameter; the parameters are limit, base_model, ",
    "GET /v1/loras?%C3%A9=1": "query: unknown query parameter; the parameters are limit, base_model, ",
    "GET /v1/loras?name=a&name=b": "name: must be sent once",
}


@pytest.mark.parametrize(("call", "message"), CLOSED.items())
async def test_a_query_parameter_that_there_is_not_is_named_after_the_key_is_known(
    service: TestService, regular: Member, call: str, message: str
) -> None:
    method, path = call.split(" ")
    body = {"prompt": "a boat"} if method == "POST" else None
    refused(await service.client.request(method, path, json=body), 401, "unauthorized")
    answer = await service.client.request(method, path, json=body, headers=regular.b)
    refused(answer, 400, "invalid_parameter", message)
    as_published = await service.client.get(f"/v1/models?{path.partition('?')[2]}", headers=regular.b)
    assert as_published.status_code == 200


async def test_the_list_is_the_account_s_own(service: TestService, member: Member) -> None:
    await service.submit(member)
    other = await service.member()
    assert await listing(service, other) == {"jobs": []}


@pytest.mark.parametrize("ms", ["0", "1", "9" * 14])
async def test_a_cursor_of_any_time_is_a_page(service: TestService, member: Member, ms: str) -> None:
    job_id = await service.submit(member)
    page = await listing(service, member, f"?cursor={ms}-gen_{'a' * 26}")
    assert [job["id"] for job in page["jobs"]] == ([job_id] if ms == "9" * 14 else [])


@pytest.mark.parametrize(
    "query",
    [
        "?limit=0",
        "?limit=201",
        "?limit=-1",
        "?limit=x",
        "?limit=",
        "?limit=1.5",
        "?limit=٣",
        "?limit=" + "9" * 5000,
        "?cursor=x",
        "?cursor=",
        "?cursor=-1",
        "?cursor=" + "9" * 16,
        "?cursor=1-2",
        "?cursor=1-gen_x",
        "?cursor=" + "9" * 15 + "-gen_" + "a" * 26,
        "?cursor=" + "9" * 500,
        "?status=done",
        "?kind=video",
        "?created_after=2026-11-21",
        "?created_before=2026-11-21T12:00:00+00:00",
        "?metadata=",
        "?metadata=x",
        "?limit=1&limit=2",
        "?state=failed",
    ],
)
async def test_a_bad_page_is_refused_with_the_range(service: TestService, regular: Member, query: str) -> None:
    answer = await service.client.get(f"/v1/jobs{query}", headers=regular.a)
    assert answer.status_code == 400
    assert error_of(answer)["message"].startswith(query[1:].split("=")[0] + ": ")
