"""The service below a prefix, as under Ray Serve's `route_prefix`: every address in a response works."""

import re
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.app import BASE, BODY_A, BODY_B, Member, TestService
from tests.support import png_of


@pytest.fixture
async def below(service: TestService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(service.resources.app(), root_path="/studio")  # pyright: ignore[reportArgumentType]
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
        yield client


async def test_a_job_can_be_followed_from_its_location_to_its_image(
    service: TestService, member: Member, below: httpx.AsyncClient
) -> None:
    for body, headers in ((BODY_A, member.a), (BODY_B, member.b)):
        accepted = await below.post("/studio/v1/generate", json=body, headers=headers)
        location = accepted.headers["location"]
        assert location.startswith("/studio/v1/")
        await service.complete(location.rsplit("/", 1)[1])
        record = (await below.get(location, headers=headers)).json()
        url = record["images"][0]["url"] if "images" in record else record["image_url"]
        assert url.startswith(f"{BASE}/studio/files/")
        assert (await below.get(url)).content == png_of((512, 512))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/studio/", "/studio/docs", "/studio/docs/a", "/studio/docs/b"])
async def test_the_links_of_a_page_lead_somewhere(below: httpx.AsyncClient, path: str) -> None:
    page = await below.get(path)
    assert page.status_code == 200
    targets = re.findall(r'(?:href|src|data-document)="(/[^"]*)"', page.text)
    assert targets
    for target in targets:
        assert target.startswith("/studio/")
        assert (await below.get(target, follow_redirects=True)).status_code == 200, target


async def test_the_document_names_the_prefix_and_an_unknown_caller_at_a_path_of_b_sees_its_plan(
    below: httpx.AsyncClient,
) -> None:
    document = (await below.get("/studio/openapi/a.json")).json()
    assert document["servers"] == [{"url": f"{BASE}/studio"}]
    answer = await below.get("/studio/v1/models")
    assert (answer.status_code, answer.headers["ratelimit-policy"][:11]) == (401, '"b-minute";')
    assert (await below.get("/v1/generate")).status_code in (404, 405)
