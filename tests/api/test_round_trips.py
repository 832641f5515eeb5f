"""Redis round trips per request, counted by the server as messages it has read."""

from collections.abc import Awaitable, Callable, Iterator
from statistics import median

import httpx
import pytest

from serve_app.domain.requests import Variant
from tests.api.app import BODY_A, Member, TestService
from tests.support import PRIVATE_ADAPTER, plain_redis

TIMES = 10
RoundTrips = Callable[[Callable[[], Awaitable[httpx.Response]]], Awaitable[float]]


@pytest.fixture
def round_trips(service: TestService) -> Iterator[RoundTrips]:
    """Count the messages that Redis reads for a request, as the median of several.

    What the service sends at intervals is left out, and so is the first request, which may load a script.
    """
    server = plain_redis(service.resources.redis_url)

    def read() -> int:
        return server.info("stats")["total_reads_processed"]

    async def count(ask: Callable[[], Awaitable[httpx.Response]]) -> float:
        await ask()
        counts: list[int] = []
        for _ in range(TIMES):
            before = read()
            await ask()
            counts.append(read() - before - 1)  # less the query itself
        return median(counts)

    yield count
    server.close()


@pytest.mark.parametrize("is_finished", [False, True], ids=["waiting", "completed"])
@pytest.mark.parametrize(
    ("variant", "path"),
    [(Variant.A, "/v1/generate/"), (Variant.A, "/v1/jobs/"), (Variant.B, "/v1/generations/"), (Variant.B, "/v1/jobs/")],
)
async def test_a_poll_reads_key_and_record_in_one_round_trip(
    service: TestService, round_trips: RoundTrips, member: Member, variant: Variant, path: str, is_finished: bool
) -> None:
    job_id = await service.submit(member, variant)
    if is_finished:
        await service.complete(job_id)

    async def poll() -> httpx.Response:
        answer = await service.client.get(path + job_id, headers=member.headers(variant))
        assert answer.status_code == 200
        return answer

    assert await round_trips(poll) == 1


@pytest.mark.parametrize("lora_id", [BODY_A["lora_id"], PRIVATE_ADAPTER, "model_nothing"])
async def test_a_generation_is_authenticated_in_one_round_trip_and_accepted_or_refused_in_one_more(
    service: TestService, round_trips: RoundTrips, member: Member, lora_id: str
) -> None:
    body = BODY_A | {"lora_id": lora_id}
    assert await round_trips(lambda: service.client.post("/v1/generate", json=body, headers=member.a)) == 2


@pytest.mark.parametrize("lora_id", ["Outline", "Private", "nothing"])
async def test_a_name_in_place_of_an_id_costs_one_more_whether_it_exists_or_not(
    service: TestService, round_trips: RoundTrips, member: Member, lora_id: str
) -> None:
    body = BODY_A | {"lora_id": lora_id}
    assert await round_trips(lambda: service.client.post("/v1/generate", json=body, headers=member.a)) == 3


@pytest.mark.parametrize("job_id", ["gen_" + "a" * 26, "nonsense"])
async def test_a_poll_of_nothing_costs_the_same(
    service: TestService, round_trips: RoundTrips, member: Member, job_id: str
) -> None:
    assert await round_trips(lambda: service.client.get(f"/v1/generate/{job_id}", headers=member.a)) == 1


async def test_what_cannot_be_a_key_does_not_reach_redis(
    service: TestService, round_trips: RoundTrips, member: Member
) -> None:
    typo = {"Authorization": f"Bearer {member.key[:-1]}"}
    assert await round_trips(lambda: service.client.post("/v1/generate", json=BODY_A, headers=typo)) == 0
    assert await round_trips(lambda: service.client.get("/v1/generate/gen_x", headers=typo)) == 0
