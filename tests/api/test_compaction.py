"""Every route answers the same of a job whose record is compact."""

import re
from datetime import timedelta

import pytest

from serve_app.domain.requests import Variant
from tests.api.app import LORA, Member, TestService, error_of

SIGNED = re.compile(r"exp=\d+&kid=\w+&sig=\w+")


async def _answers(service: TestService, member: Member, variant: Variant, job_id: str) -> list[str]:
    """What both keys read of the job, without the times at which addresses were signed."""
    own = f"/v1/generate/{job_id}" if variant is Variant.A else f"/v1/generations/{job_id}"
    paths = [own, f"/v1/jobs/{job_id}", "/v1/jobs", f"/v1/jobs?lora={LORA}&state=completed", "/v1/usage"]
    answers = [await service.client.get(path, headers=member.headers(variant)) for path in paths]
    assert {answer.status_code for answer in answers} == {200}
    return [SIGNED.sub("", answer.text) for answer in answers]


@pytest.mark.parametrize("variant", Variant)
async def test_every_route_answers_the_same_of_a_compact_record(
    service: TestService, member: Member, variant: Variant
) -> None:
    asked = {"seed": 2**64 - 1} if variant is Variant.A else {}
    job_id = await service.submit(member, variant, **asked)
    job = await service.complete(job_id)
    before = await _answers(service, member, variant, job_id)
    assert await service.resources.compaction.compact(timedelta()) >= 1
    assert await _answers(service, member, variant, job_id) == before
    record = (await service.client.get(f"/v1/jobs/{job_id}", headers=member.a)).json()
    assert (await service.client.get(record["images"][0]["url"])).status_code == 200
    canceled = await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=member.a)
    assert (canceled.status_code, canceled.json()["status"]) == (200, "completed")
    other = await service.member()
    assert error_of(await service.client.get(f"/v1/jobs/{job_id}", headers=other.a))["code"] == "not_found"
    assert (await service.client.delete(f"/v1/jobs/{job_id}", headers=other.a)).status_code == 404
    image = {"image_id": job.images[0].image_id}
    upscale = await service.client.post("/v1/upscale", json=image, headers=member.a)
    assert (upscale.status_code == 404) == (variant is Variant.B), "its images are not interface A's"
    assert (await service.client.delete(f"/v1/jobs/{job_id}", headers=member.headers(variant))).status_code == 204
    assert (await service.client.get(f"/v1/jobs/{job_id}", headers=member.a)).status_code == 404
    assert not await service.resources.images.exists(job.images[0].image_uri)


async def test_an_idempotency_key_is_replayed_and_freed_with_a_compact_record(
    service: TestService, member: Member
) -> None:
    body = {"prompt": "a boat", "lora_id": LORA}
    headers = member.a | {"Idempotency-Key": "once"}
    first = (await service.client.post("/v1/generate", json=body, headers=headers)).json()["request_id"]
    await service.complete(first)
    await service.resources.compaction.compact(timedelta())
    again = await service.client.post("/v1/generate", json=body, headers=headers)
    assert again.json()["request_id"] == first
    assert (await service.client.delete(f"/v1/jobs/{first}", headers=member.a)).status_code == 204
    anew = await service.client.post("/v1/generate", json=body, headers=headers)
    assert anew.json()["request_id"] != first
