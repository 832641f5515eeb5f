"""More requests than the connections to Redis carry are refused by a code of their own.

Redis answers meanwhile.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from serve_app.domain.requests import Variant
from tests.api.app import BODY_A, Member, TestService, client_of, open_service, refused
from tests.support import plain_redis

CONNECTIONS = 2
WAIT = timedelta(milliseconds=100)
PAUSE_MS = 1_500
"""The pause is shorter than a call waits for its answer, so that calls that have a connection get theirs."""


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestService]:
    """A service with few connections, for which a call waits only briefly; no poll may wait."""
    folder = tmp_path_factory.mktemp("overload")
    async with open_service(folder, redis_connections=CONNECTIONS, redis_wait=WAIT, waiting_polls=0) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("variant", Variant)
async def test_a_call_that_waits_too_long_for_a_connection_is_overloaded(
    service: TestService, member: Member, variant: Variant
) -> None:
    job_id = await service.submit(member, variant)

    async def poll() -> httpx.Response:
        return await service.poll(member, variant, job_id)

    with plain_redis(service.resources.redis_url) as admin:
        admin.client_pause(PAUSE_MS)  # both connections are in use meanwhile
        held = [asyncio.create_task(poll()) for _ in range(CONNECTIONS)]
        await asyncio.sleep(0)
        answer, ready = await asyncio.gather(poll(), service.resources.readiness())
    refused(answer, 503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert ready.states["redis"] == "busy"
    assert ready.is_ready, "a replica that is only busy stays in the balance"
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * CONNECTIONS


async def test_polls_wait_only_in_the_places_of_the_settings(service: TestService, member: Member) -> None:
    path = f"/v1/generate/{await service.submit(member)}"
    answer = await service.client.get(path, headers=member.a | {"Prefer": "wait=30"})
    assert answer.json()["status"] == "processing"
    assert "preference-applied" not in answer.headers


def test_the_wait_fits_the_requests_that_may_be_open(service: TestService) -> None:
    sized = service.resources.settings.model_copy(update={"redis_wait": None, "open_requests": 4_000})
    assert sized.longest_redis_wait == timedelta(seconds=20)
    assert sized.model_copy(update={"open_requests": 1}).longest_redis_wait >= timedelta(seconds=3)
    assert sized.model_copy(update={"waiting_polls": 9_000}).longest_redis_wait == timedelta(seconds=20)
    few = sized.model_copy(update={"waiting_polls": 9_000}).with_requests_at_once(9)
    assert (few.open_requests, few.waiting_polls, few.requests_at_once) == (5, 4, 9)


async def test_half_a_body_takes_no_place_from_others(tmp_path: Path) -> None:
    """One request at a time is in progress, and none may wait."""
    async with open_service(tmp_path, open_requests=1, waiting_polls=0) as small:
        member = await small.member()
        may_end, halves = asyncio.Event(), list[asyncio.Task[httpx.Response]]()
        async with client_of(small.resources.app(requests_waiting=1)) as client:

            async def in_halves() -> AsyncIterator[bytes]:
                content = json.dumps(BODY_A).encode()
                yield content[:9]
                started.set()
                await may_end.wait()
                yield content[9:]

            for _ in range(8):
                started = asyncio.Event()
                halves.append(asyncio.create_task(client.post("/v1/generate", content=in_halves(), headers=member.a)))
                await started.wait()
            whole = await client.post("/v1/generate", json=BODY_A, headers=member.a)
            may_end.set()
            statuses = [(await half).status_code for half in halves]
    assert (whole.status_code, statuses) == (202, [202] * 8)


async def test_requests_beyond_those_that_may_wait_are_overloaded(tmp_path: Path) -> None:
    origin = {"Origin": "https://app.example.com"}
    async with open_service(tmp_path, open_requests=1, waiting_polls=0, cors_origins=(*origin.values(),)) as small:
        member = await small.member()
        path = f"/v1/generate/{await small.submit(member)}"
        async with client_of(small.resources.app(requests_waiting=2)) as client:
            with plain_redis(small.resources.redis_url) as admin:
                admin.client_pause(PAUSE_MS)
            answers = await asyncio.gather(*(client.get(path, headers=member.a | origin) for _ in range(6)))
    assert [answer.status_code for answer in answers].count(200) == 3
    for answer in answers:
        if answer.status_code != 200:
            refused(answer, 503, "overloaded")
            assert answer.headers["retry-after"]
            assert answer.headers["access-control-allow-origin"] == origin["Origin"], "or its page would see no answer"
