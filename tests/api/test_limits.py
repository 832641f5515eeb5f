"""Rate limits: the six plans, the requests that count, and windows that fill and open again."""

import asyncio
import time

import httpx
import pytest

from serve_app.domain.accounts import BUILTIN_PLANS, Plan
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from tests.api.app import BODY_A, UNKNOWN_NAME, Member, TestService, open_service, refused
from tests.support import end_sooner, plain_redis, wait_until

A, B = Variant.A, Variant.B
UNKNOWN = UNKNOWN_NAME


async def cheap(service: TestService, member: Member, variant: Variant) -> httpx.Response:
    """A counted request that leaves no job behind."""
    if variant is A:
        return await service.client.post("/v1/generate", content="{", headers=member.a)
    return await service.client.get("/v1/models", headers=member.b)


def rate_headers(answer: httpx.Response) -> tuple[int, int, int]:
    return (
        int(answer.headers["x-ratelimit-limit"]),
        int(answer.headers["x-ratelimit-remaining"]),
        int(answer.headers["x-ratelimit-reset"]),
    )


async def on_plan(service: TestService, plan: Plan) -> Member:
    """An account on a plan of one interface."""
    if plan.variant is A:
        return await service.member(plan_a=plan.name)
    return await service.member(plan_b=plan.name)


@pytest.mark.slow
@pytest.mark.parametrize("plan", BUILTIN_PLANS, ids=lambda plan: f"{plan.variant}-{plan.name}")
async def test_a_plan_lets_exactly_its_number_through_until_its_window_opens_again(
    service: TestService, plan: Plan
) -> None:
    """All requests but the first and the last eight are written into the window, in which each looks the same."""
    member, opened = await on_plan(service, plan), time.time()
    name, window = {A: "a-hourly", B: "b-minute"}[plan.variant], round(plan.window.total_seconds())

    async def passes(used: int) -> None:
        answer = await cheap(service, member, plan.variant)
        assert answer.status_code != 429, used
        assert rate_headers(answer)[:2] == (plan.limit, plan.limit - used)
        assert answer.headers["ratelimit-policy"] == f'"{name}";q={plan.limit};w={window}'
        assert answer.headers["ratelimit"].startswith(f'"{name}";r={plan.limit - used};t=')
        assert 0 < int(answer.headers["ratelimit"].rpartition("=")[2]) <= window

    await passes(1)
    with plain_redis(service.resources.redis_url) as redis:
        counted = redis_key("rate", member.account.id, plan.variant)
        [(_, ends)] = redis.zrange(counted, 0, -1, withscores=True)
        redis.zadd(counted, {f"r{number}": ends for number in range(plan.limit - 9)})
        for used in range(plan.limit - 7, plan.limit + 1):
            await passes(used)
        for _ in range(3):
            answer = await cheap(service, member, plan.variant)
            refused(answer, 429, "rate_limit_exceeded")
            limit, remaining, reset = rate_headers(answer)
            assert (limit, remaining) == (plan.limit, 0)
            assert opened + window - 2 <= reset <= time.time() + window + 2
            assert int(answer.headers["retry-after"]) >= reset - time.time() - 1
            assert int(answer.headers["retry-after"]) > 0
            assert f"{plan.limit} requests per {'hour' if plan.variant is A else 'minute'}" in answer.text
        ends_ms = end_sooner(redis, counted, 300)
    await wait_until(lambda: opens_again(service, member, plan))
    assert time.time() * 1000 >= ends_ms


async def opens_again(service: TestService, member: Member, plan: Plan) -> bool:
    answer = await cheap(service, member, plan.variant)
    assert answer.status_code == 429 or rate_headers(answer)[:2] == (plan.limit, plan.limit - 1)
    return answer.status_code != 429


@pytest.mark.parametrize("variant", Variant)
async def test_of_many_at_once_exactly_the_limit_passes(service: TestService, variant: Variant) -> None:
    member = await service.member(plan_a="basic", plan_b="basic")
    limit = 50 if variant is A else 30
    answers = await asyncio.gather(*(cheap(service, member, variant) for _ in range(limit + 10)))
    assert sum(answer.status_code != 429 for answer in answers) == limit
    left = sorted(rate_headers(answer)[1] for answer in answers if answer.status_code != 429)
    assert left == list(range(limit))


@pytest.mark.slow
async def test_polling_is_not_counted(service: TestService) -> None:
    member = await service.member(plan_a="basic", plan_b="free")
    a_job, b_job = await service.submit(member, A), await service.submit(member, B)
    for _ in range(6):
        for path, headers in (
            (f"/v1/generate/{a_job}", member.a),
            (f"/v1/upscale/{a_job}", member.a),
            (f"/v1/generations/{b_job}", member.b),
            (f"/v1/jobs/{a_job}", member.a),
            (f"/v1/generate/gen_{UNKNOWN}", member.a),
        ):
            answer = await service.client.get(path, headers=headers)
            assert answer.status_code in (200, 404)
            assert rate_headers(answer)[:2] == ((50, 49) if "Authorization" in headers else (10, 9))


async def test_errors_of_the_caller_are_counted(service: TestService) -> None:
    member = await service.member(plan_a="basic")
    forbidden = BODY_A | {"lora_id": "model_nothing"}
    tries: list[tuple[str, dict[str, object]]] = [
        ("/v1/generate", {"content": "{"}),
        ("/v1/generate", {"json": {}}),
        ("/v1/generate", {"content": b" " * 70_000}),
        ("/v1/generate", {"json": forbidden}),
        ("/v1/upscale", {"json": {"image_id": "img_" + UNKNOWN}}),
    ]
    for count, (path, body) in enumerate(tries, start=1):
        answer = await service.client.post(path, headers=member.a, **body)  # pyright: ignore[reportArgumentType]
        assert rate_headers(answer)[1] == 50 - count


async def test_an_unknown_caller_s_requests_count_for_nobody(service: TestService) -> None:
    member = await service.member(plan_a="basic")
    for _ in range(5):
        await service.client.post("/v1/generate", json=BODY_A, headers={"Authorization": f"Bearer {member.key}x"})
        await service.client.post("/v1/generate", json=BODY_A, headers=member.a | {"X-API-Key": "x"})
        await service.client.delete("/v1/generate", headers=member.a)
        await service.client.get("/v1/nothing", headers=member.a)
    assert rate_headers(await cheap(service, member, A))[1] == 49


@pytest.mark.parametrize("variant", Variant)
async def test_a_key_s_own_limit_holds_for_it_alone_and_a_refund_is_of_both(
    service: TestService, variant: Variant
) -> None:
    member = await service.member()
    keys = service.resources.api_keys
    _, secret = await keys.create(member.account.id, interfaces=frozenset(Variant), limit=1)
    limited = Member(member.account, secret)
    job_id = await service.submit(limited, variant)
    over = await service.generate(limited, variant)
    refused(over, 429, "rate_limit_exceeded", "This API key allows 1 requests per hour")
    assert rate_headers(over)[:2] == (1, 0)
    assert int(over.headers["retry-after"]) > 3000
    await service.submit(member, variant)
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="")
    await service.resources.queue.fail(await service.lease(job_id), failure, retry=False)
    await service.submit(limited, variant)


async def test_a_full_queue_is_a_429_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with open_service(tmp_path_factory.mktemp("small_queue"), max_queued_per_account=2) as small_queue:
        member = await small_queue.member()
        jobs = [await small_queue.submit(member, A), await small_queue.submit(member, B)]
        for variant in Variant:
            answer = await small_queue.generate(member, variant)
            refused(answer, 429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert rate_headers(answer)[1] > 0
        forbidden = await small_queue.generate(member, lora_id="x")
        missing = await small_queue.client.post("/v1/upscale", json={"image_id": "x"}, headers=member.a)
        assert (forbidden.status_code, missing.status_code) == (403, 404), "both come before the queue"
        await small_queue.complete(jobs[0])
        await small_queue.submit(member, A)
