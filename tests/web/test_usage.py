"""The usage page: both plans' windows, images by LoRA, key and day in tables with bars and in the CSV."""

import csv
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
import redis

from serve_app.domain.requests import LoraUse
from serve_app.store.keys import redis_key
from tests.api.app import LORA, Member, TestService
from tests.composition import Resources
from tests.made_jobs import complete
from tests.support import adapter_id
from tests.web.browser import Browser, Page


@pytest.mark.slow
async def test_a_bar_shows_what_is_used_of_each_plan_and_warns_above_four_fifths(
    member: Member, browser: Browser, redis_db: redis.Redis
) -> None:
    """Both the usage page and the settings page show it."""
    ends_ms = int((datetime.now(UTC) + timedelta(minutes=30)).timestamp() * 1000)
    redis_db.zadd(redis_key("rate", member.account.id, "a"), {f"r{number}": ends_ms for number in range(40)})
    redis_db.zadd(redis_key("rate", member.account.id, "b"), {f"r{number}": ends_ms for number in range(9)})
    for path in ("/console/usage", "/console/settings"):
        page = await browser.open(path)
        assert _bars(page) == {"40 of 50 requests used": "use", "9 of 10 requests used": "use much"}
        assert f"{datetime.fromtimestamp(ends_ms // 1000, UTC):%H:%M:%S} UTC" in page.text


@pytest.mark.slow
async def test_the_accounts_completed_images_are_shown_by_lora_and_key_and_in_the_csv(
    service: TestService, member: Member, browser: Browser, resources: Resources, redis_db: redis.Redis
) -> None:
    redis_db.hset(redis_key("lora", LORA), "name", "=HYPERLINK(1)<b>")
    redis_db.incr(redis_key("loras_revision"))
    await service.complete(await service.submit(await service.member(plan_a="basic", plan_b="basic")))
    assert "No image was completed" in (await browser.open("/console/usage")).text
    job = await service.complete(await service.submit(member, num_images=3, steps=20))
    page = await browser.open("/console/usage")
    assert "=HYPERLINK(1)<b> 3 15.7 0.5" in page.text, "images, megapixel-steps and seconds in the table"
    assert f"{member.key[:8]}…{member.key[-4:]} 3 15.7 0.5" in page.text
    assert f"{(await resources.usage.today()).isoformat()} 3 15.7 0.5" in page.text
    answer = (await browser.open("/console/usage.csv")).answer
    for loras, name in (((), "No LoRA"), ((LORA, adapter_id("neon")), "=HYPERLINK(1)<b> + Neon")):
        uses, base = tuple(LoraUse(each, 0.5) for each in loras), "" if loras else "pocket"
        await complete(resources, member.account.id, seeds=(1,), loras=uses, base_model=base)
        assert f"{name} 1 " in (await browser.open("/console/usage")).text
        assert f"{name}," in (await browser.http.get("/console/usage.csv")).text
    assert answer.headers["content-type"].startswith("text/csv")
    [row] = csv.DictReader(StringIO(answer.text))
    assert (row["lora"], row["lora_id"], row["key_id"]) == ("'=HYPERLINK(1)<b>", LORA, job.key_id)
    assert (row["images"], row["megapixel_steps"], row["worker_seconds"]) == ("3", "15.729", "0.500")
    assert row["day"] == (await resources.usage.today()).isoformat()


def _bars(page: Page) -> dict[str, str]:
    """Return the classes of the bars by what they say."""
    bars = [
        attributes
        for tag, attributes in page.tags
        if tag == "svg" and "requests used" in attributes.get("aria-label", "")
    ]
    return {bar["aria-label"]: bar["class"] for bar in bars}
