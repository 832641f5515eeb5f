"""Rate limits: the six plans, the requests that count, and windows that fill and open again."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.domain.accounts import BUILTIN_PLANS, Plan
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.domain.requests import Variant
from tests.api.app import BODY_A, UNKNOWN_NAME, Member, TestService, open_service, refused
from tests.support import wait_until

A, B = Variant.A, Variant.B
UNKNOWN = UNKNOWN_NAME
SHORT_S = 6


async def cheap(service: TestService, member: Member, variant: Variant) -> httpx.Response:
    """A counted request that leaves no job behind."""
    if variant is A:
        return await service.client.post("/v1/generate", content="{", headers=member.a)
    return await service.client.get("/v1/models", headers=member.b)


def short_limit(plan: Plan) -> int:
    """A plan of fewer requests, so that a window fills within its few seconds on a loaded machine too."""
    return max(1, plan.limit // 50)


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
async def test_a_plan_lets_exactly_its_number_through(service: TestService, plan: Plan) -> None:
    member = await on_plan(service, plan)
    opened = time.time()
    for used in range(1, plan.limit + 1):
        answer = await cheap(service, member, plan.variant)
        assert answer.status_code != 429, used
        assert rate_headers(answer)[:2] == (plan.limit, plan.limit - used)
        name, window = {A: "a-hourly", B: "b-minute"}[plan.variant], round(plan.window.total_seconds())
        assert answer.headers["ratelimit-policy"] == f'"{name}";q={plan.limit};w={window}'
        assert answer.headers["ratelimit"].startswith(f'"{name}";r={plan.limit - used};t=')
        assert 0 < int(answer.headers["ratelimit"].rpartition("=")[2]) <= window
    for _ in range(3):
        answer = await cheap(service, member, plan.variant)
        refused(answer, 429, "rate_limit_exceeded")
        limit, remaining, reset = rate_headers(answer)
        assert (limit, remaining) == (plan.limit, 0)
        assert opened + plan.window.total_seconds() - 2 <= reset <= time.time() + plan.window.total_seconds() + 2
        assert int(answer.headers["retry-after"]) >= reset - time.time() - 1
        assert int(answer.headers["retry-after"]) > 0
        assert f"{plan.limit} requests per {'hour' if plan.variant is A else 'minute'}" in answer.text


@pytest.fixture(scope="module")
async def short_windows(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestService]:
    """A service whose six plans have short windows."""
    rows = [
        {"interface": str(plan.variant), "name": plan.name, "limit": short_limit(plan), "window_s": SHORT_S}
        for plan in BUILTIN_PLANS
    ]
    async with open_service(tmp_path_factory.mktemp("short_windows"), rows) as opened:
        yield opened


@pytest.mark.slow
async def test_a_full_window_opens_again_for_every_plan(short_windows: TestService) -> None:
    """All six plans are filled at once, so that they wait together."""

    async def fill_and_wait(plan: Plan) -> None:
        member, limit = await on_plan(short_windows, plan), short_limit(plan)
        answers = [await cheap(short_windows, member, plan.variant) for _ in range(limit + 2)]
        assert sum(answer.status_code == 429 for answer in answers) == 2
        over = next(answer for answer in answers if answer.status_code == 429)
        assert rate_headers(over)[:2] == (limit, 0)
        reset = rate_headers(over)[2]
        assert int(over.headers["retry-after"]) <= SHORT_S
        assert f'"{plan.variant}-{SHORT_S}s";q={limit};w={SHORT_S}' == over.headers["ratelimit-policy"]

        async def open_again() -> bool:
            asked = time.time()
            answer = await cheap(short_windows, member, plan.variant)
            if answer.status_code == 429:
                assert asked <= reset
                return False
            assert rate_headers(answer)[:2] == (limit, limit - 1)
            assert rate_headers(answer)[2] > reset
            return True

        await wait_until(open_again, timeout=SHORT_S + 5)

    await asyncio.gather(*(fill_and_wait(plan) for plan in BUILTIN_PLANS))


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
    for _ in range(60):
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
