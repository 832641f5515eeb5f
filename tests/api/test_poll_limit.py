"""Polls are limited per key and second, far above what clients need, by a 429 that touches no plan."""

from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.domain.requests import Variant
from serve_app.jobs.polling import Poller
from serve_app.store.redis_client import connect
from tests.api.app import Member, TestService, client_of, error_of
from tests.api.test_documents import document_of

PATHS = [(Variant.A, "/v1/generate/"), (Variant.A, "/v1/jobs/"), (Variant.B, "/v1/generations/")]
now = [1000.0]


@pytest.fixture
async def client(service: TestService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that takes three polls a second, by a clock that the test moves."""
    redis = connect(service.resources.redis_url)
    settings = service.resources.settings.model_copy(update={"polls_per_second": 3})
    poller = Poller(redis, settings, clock=lambda: now[0])
    async with client_of(service.resources.with_parts(poller=poller, settings=settings).app()) as opened:
        yield opened
    await redis.aclose()


@pytest.mark.parametrize(("variant", "path"), PATHS)
async def test_polls_beyond_the_bound_wait_a_second(
    service: TestService, client: httpx.AsyncClient, variant: Variant, path: str
) -> None:
    member = await service.member(plan_a="basic", plan_b="free")
    job_id, headers = await service.submit(member, variant), member.headers(variant)
    answers = [await client.get(path + job_id, headers=headers) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    refused = answers[-1]
    assert error_of(refused)["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "1"
    if path == "/v1/jobs/":
        for polled in ("/v1/jobs/{job_id}", "/v1/jobs/{job_id}/events"):
            assert "429" in (await document_of(service, "jobs"))["paths"][polled]["get"]["responses"]
    for name in ("x-ratelimit-limit", "x-ratelimit-remaining"):
        assert refused.headers[name] == answers[0].headers[name]
    other = Member(member.account, await service.key(member.account))
    assert (await client.get(path + job_id, headers=other.headers(variant))).status_code == 200, "another key"
    now[0] += 1
    assert (await client.get(path + job_id, headers=headers)).status_code == 200


async def test_an_unknown_key_stays_unauthorized_however_often_it_asks(
    service: TestService, client: httpx.AsyncClient, member: Member
) -> None:
    [key] = await service.resources.api_keys.list(member.account.id)
    await service.resources.api_keys.revoke(key.id)
    answers = [await client.get("/v1/jobs/gen_x", headers=member.a) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {401}
