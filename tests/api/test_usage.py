"""`GET /v1/usage`: an account's own, by day, key and LoRA, with either credential."""

import pytest

from tests.api.app import LORA, Member, TestService, error_of


async def test_usage_is_the_accounts_own_by_day_key_and_lora(service: TestService, member: Member) -> None:
    job = await service.complete(await service.submit(member, num_images=2, steps=20))
    await service.complete(await service.submit(await service.member()))
    answer = await service.client.get("/v1/usage?days=2", headers=member.b)
    assert answer.status_code == 200, answer.text
    today = (await service.resources.usage.today()).isoformat()
    assert answer.json()["last_day"] == today
    assert answer.json()["first_day"] < today
    assert answer.json()["usage"] == [
        {
            "day": today,
            "key_id": job.key_id,
            "lora_id": LORA,
            "images": 2,
            "megapixel_steps": 10.486,
            "worker_seconds": 0.5,
        }
    ]
    assert job.key_id


@pytest.mark.parametrize("days", ["0", "367", "x"])
async def test_a_number_of_days_out_of_range_is_named(service: TestService, member: Member, days: str) -> None:
    error = error_of(await service.client.get(f"/v1/usage?days={days}", headers=member.a))
    assert error["code"] == "invalid_parameter"
    assert error["message"].startswith("days: must be")
