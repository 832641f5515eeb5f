"""Expiry of image addresses and of records."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from serve_app.domain.requests import Variant
from tests.api.app import TestService, error_of, open_service
from tests.support import wait_until


@pytest.fixture(scope="module")
async def short_retention(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestService]:
    async with open_service(
        tmp_path_factory.mktemp("short_retention"),
        retention=timedelta(seconds=5),
        image_url_life=timedelta(seconds=1),
    ) as opened:
        yield opened


@pytest.mark.slow
async def test_an_image_address_ends_and_the_next_poll_signs_another(short_retention: TestService) -> None:
    member = await short_retention.member()
    job_id = await short_retention.submit(member)
    await short_retention.complete(job_id)

    async def url() -> str:
        record = await short_retention.client.get(f"/v1/generate/{job_id}", headers=member.a)
        return record.json()["images"][0]["url"]

    first = await url()

    async def over() -> bool:
        return (await short_retention.client.get(first)).status_code == 404

    await wait_until(over)
    assert (await short_retention.client.get(await url())).status_code == 200


@pytest.mark.slow
async def test_after_retention_a_record_is_not_found(short_retention: TestService) -> None:
    """Both interfaces are tested at once, so that they wait together."""
    await asyncio.gather(*(_is_not_found_after_retention(short_retention, variant) for variant in Variant))


async def _is_not_found_after_retention(short_retention: TestService, variant: Variant) -> None:
    member = await short_retention.member()
    job = await short_retention.complete(await short_retention.submit(member, variant))

    async def gone() -> bool:
        answer = await short_retention.poll(member, variant, job.id)
        return answer.status_code == 404 and error_of(answer)["code"] == "not_found"

    assert not await gone()
    await wait_until(gone, timeout=30)
    image = {"image_id": job.images[0].image_id}
    assert (await short_retention.client.post("/v1/upscale", json=image, headers=member.a)).status_code == 404
