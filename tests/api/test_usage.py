"""`GET /v1/usage`: an account's own, by day, key and LoRA, with either credential."""

from datetime import date, timedelta

import pytest

from serve_app.store.keys import redis_key
from tests.api.app import LORA, Member, TestService, error_of
from tests.support import plain_redis


async def test_usage_is_the_accounts_own_by_day_key_and_lora(service: TestService, member: Member) -> None:
    job = await service.complete(await service.submit(member, num_images=2, steps=20))
    enlarge = {"kind": "upscale", "image_id": job.images[0].image_id, "scale_factor": 4}
    larger = await service.client.post("/v1/jobs", json=enlarge, headers=member.a)
    await service.complete(larger.json()["id"])
    await service.complete(await service.submit(await service.member()))
    answer = await service.client.get("/v1/usage?days=2", headers=member.b)
    assert answer.status_code == 200, answer.text
    day = await service.resources.usage.today()
    today, yesterday = day.isoformat(), (day - timedelta(days=1)).isoformat()
    assert (answer.json()["first_day"], answer.json()["last_day"]) == (yesterday, today)
    assert answer.json()["usage"] == [
        {
            "day": today,
            "key_id": job.key_id,
            "lora_id": LORA,
            "images": 2,
            "megapixel_steps": 10.486,
            "worker_seconds": 0.5,
        },
        {
            "day": today,
            "key_id": job.key_id,
            "lora_id": "upscale",
            "images": 1,
            "megapixel_steps": 4.194,
            "worker_seconds": 0.5,
        },
    ]
    assert job.key_id
    with plain_redis(service.resources.redis_url) as redis:
        ago = [str((day - date(1970, 1, 1)).days - days) for days in (0, 1)]
        redis.rename(*(redis_key("usage", member.account.id, each) for each in ago))
    for days, shown in (("1", []), ("2", [yesterday])):
        answer = await service.client.get(f"/v1/usage?days={days}", headers=member.a)
        assert [row["day"] for row in answer.json()["usage"]] == 2 * shown


@pytest.mark.parametrize("days", ["0", "367", "x"])
async def test_a_number_of_days_out_of_range_is_named(service: TestService, member: Member, days: str) -> None:
    error = error_of(await service.client.get(f"/v1/usage?days={days}", headers=member.a))
    assert error["code"] == "invalid_parameter"
    assert error["message"].startswith("days: must be")
