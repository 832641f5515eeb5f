"""What time takes away: addresses first, then records."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from serve_app.domain.requests import Variant
from serve_app.stores.embedded import stop_redis
from tests.api.house import House, error_of, house_settings, open_house
from tests.support import wait_until


@pytest.fixture(scope="module")
async def forgetful(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    settings = house_settings(
        tmp_path_factory.mktemp("forgetful"),
        [],
        retention=timedelta(seconds=8),
        image_url_life=timedelta(seconds=1),
    )
    async with open_house(settings) as opened:
        yield opened
    stop_redis(settings.data_dir)


async def test_an_image_address_ends_and_the_next_poll_signs_another(forgetful: House) -> None:
    member = await forgetful.member()
    job_id = await forgetful.submit(member)
    await forgetful.complete(job_id)

    async def url() -> str:
        record = await forgetful.client.get(f"/v1/generate/{job_id}", headers=member.a)
        return record.json()["images"][0]["url"]

    first = await url()

    async def over() -> bool:
        return (await forgetful.client.get(first)).status_code == 404

    await wait_until(over)
    assert (await forgetful.client.get(await url())).status_code == 200


@pytest.mark.parametrize("variant", Variant)
async def test_after_retention_a_record_is_as_good_as_none(forgetful: House, variant: Variant) -> None:
    member = await forgetful.member()
    job = await forgetful.complete(await forgetful.submit(member, variant))
    path = ("/v1/generate/" if variant is Variant.A else "/v1/generations/") + job.id

    async def gone() -> bool:
        answer = await forgetful.client.get(path, headers=member.headers(variant))
        return answer.status_code == 404 and error_of(answer)["code"] == "not_found"

    assert not await gone()
    await wait_until(gone, timeout=30)
    image = {"image_id": job.images[0].image_id}
    assert (await forgetful.client.post("/v1/upscale", json=image, headers=member.a)).status_code == 404
