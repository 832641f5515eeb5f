"""The six plans, what counts, and a window that opens, fills and opens again."""

import asyncio
import time
from collections.abc import AsyncIterator
from math import ceil

import httpx
import pytest

from serve_app.domain.accounts import SEED_PLANS, Plan
from serve_app.domain.requests import Variant
from serve_app.stores.embedded import stop_redis
from tests.api.house import BODY_A, BODY_B, House, Member, error_of, house_settings, open_house
from tests.support import wait_until

A, B = Variant.A, Variant.B
UNKNOWN = "a" * 26
SHORT_S = 6


async def cheap(house: House, member: Member, variant: Variant) -> httpx.Response:
    """A counted request that leaves no job behind."""
    if variant is A:
        return await house.client.post("/v1/generate", content="{", headers=member.a)
    return await house.client.get("/v1/models", headers=member.b)


def short_limit(plan: Plan) -> int:
    """A plan of fewer requests, so that a window fills within its few seconds on a loaded machine too."""
    return max(1, plan.limit // 50)


def standing(answer: httpx.Response) -> tuple[int, int, int]:
    return (
        int(answer.headers["x-ratelimit-limit"]),
        int(answer.headers["x-ratelimit-remaining"]),
        int(answer.headers["x-ratelimit-reset"]),
    )


async def on_plan(house: House, plan: Plan) -> Member:
    """An account on a plan of one interface."""
    if plan.variant is A:
        return await house.member(plan_a=plan.name)
    return await house.member(plan_b=plan.name)


@pytest.mark.parametrize("plan", SEED_PLANS, ids=lambda plan: f"{plan.variant}-{plan.name}")
async def test_a_plan_lets_exactly_its_number_through(house: House, plan: Plan) -> None:
    member = await on_plan(house, plan)
    opened = time.time()
    for used in range(1, plan.limit + 1):
        answer = await cheap(house, member, plan.variant)
        assert answer.status_code != 429, used
        assert standing(answer)[:2] == (plan.limit, plan.limit - used)
    for _ in range(3):
        answer = await cheap(house, member, plan.variant)
        assert answer.status_code == 429
        assert error_of(answer)["code"] == "rate_limit_exceeded"
        limit, remaining, reset = standing(answer)
        assert (limit, remaining) == (plan.limit, 0)
        assert opened + plan.window.total_seconds() - 2 <= reset <= time.time() + plan.window.total_seconds() + 2
        assert int(answer.headers["retry-after"]) >= reset - time.time() - 1
        assert int(answer.headers["retry-after"]) > 0
        assert f"{plan.limit} requests per {'hour' if plan.variant is A else 'minute'}" in answer.text


@pytest.mark.parametrize("plan", SEED_PLANS, ids=lambda plan: f"{plan.variant}-{plan.name}")
async def test_the_headers_tell_a_plan_s_policy(house: House, plan: Plan) -> None:
    member = await on_plan(house, plan)
    answer = await cheap(house, member, plan.variant)
    name = {A: "a-hourly", B: "b-minute"}[plan.variant]
    window = round(plan.window.total_seconds())
    assert answer.headers["ratelimit-policy"] == f'"{name}";q={plan.limit};w={window}'
    quoted, remaining, seconds = answer.headers["ratelimit"].split(";")
    assert (quoted, remaining) == (f'"{name}"', f"r={plan.limit - 1}")
    assert window - 2 <= int(seconds.removeprefix("t=")) <= window


@pytest.fixture(scope="module")
async def hasty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """A house whose six plans have short windows."""
    rows = [
        {"interface": str(plan.variant), "name": plan.name, "limit": short_limit(plan), "window_s": SHORT_S}
        for plan in SEED_PLANS
    ]
    settings = house_settings(tmp_path_factory.mktemp("hasty"), rows)
    async with open_house(settings) as opened:
        yield opened
    stop_redis(settings.data_dir)


async def test_a_full_window_opens_again_for_every_plan(hasty: House) -> None:
    """All six at once, so that they wait together."""

    async def fill_and_wait(plan: Plan) -> None:
        member, limit = await on_plan(hasty, plan), short_limit(plan)
        answers = [await cheap(hasty, member, plan.variant) for _ in range(limit + 2)]
        assert sum(answer.status_code == 429 for answer in answers) == 2
        over = next(answer for answer in answers if answer.status_code == 429)
        assert standing(over)[:2] == (limit, 0)
        reset = standing(over)[2]
        assert int(over.headers["retry-after"]) <= SHORT_S
        assert f'"{plan.variant}-{SHORT_S}s";q={limit};w={SHORT_S}' == over.headers["ratelimit-policy"]

        async def open_again() -> bool:
            answer = await cheap(hasty, member, plan.variant)
            if answer.status_code == 429:
                assert time.time() <= reset
                return False
            assert standing(answer)[:2] == (limit, limit - 1)
            assert standing(answer)[2] > reset
            return True

        await wait_until(open_again, timeout=SHORT_S + 5)

    await asyncio.gather(*(fill_and_wait(plan) for plan in SEED_PLANS))


@pytest.mark.parametrize("variant", Variant)
async def test_of_many_at_once_exactly_the_limit_passes(house: House, variant: Variant) -> None:
    member = await house.member(plan_a="basic", plan_b="basic")
    limit = 50 if variant is A else 30
    answers = await asyncio.gather(*(cheap(house, member, variant) for _ in range(limit + 10)))
    assert sum(answer.status_code != 429 for answer in answers) == limit
    left = sorted(standing(answer)[1] for answer in answers if answer.status_code != 429)
    assert left == list(range(limit))


async def test_polling_is_not_counted(house: House) -> None:
    member = await house.member(plan_a="basic", plan_b="free")
    a_job, b_job = await house.submit(member, A), await house.submit(member, B)
    for _ in range(60):
        for path, headers in (
            (f"/v1/generate/{a_job}", member.a),
            (f"/v1/upscale/{a_job}", member.a),
            (f"/v1/generations/{b_job}", member.b),
            (f"/v1/jobs/{a_job}", member.a),
            (f"/v1/generate/gen_{UNKNOWN}", member.a),
        ):
            answer = await house.client.get(path, headers=headers)
            assert answer.status_code in (200, 404)
            assert standing(answer)[:2] == ((50, 49) if "Authorization" in headers else (10, 9))


async def test_polling_goes_on_when_the_plan_is_used_up(house: House) -> None:
    member = await house.member(plan_b="free")
    job_id = await house.submit(member, B)
    while (await cheap(house, member, B)).status_code != 429:
        pass
    answer = await house.client.get(f"/v1/generations/{job_id}", headers=member.b)
    assert answer.status_code == 200
    assert standing(answer)[:2] == (10, 0)


async def test_refusals_for_a_caller_s_mistakes_are_counted(house: House) -> None:
    member = await house.member(plan_a="basic")
    foreign = BODY_A | {"lora_id": "model_nothing"}
    tries: list[tuple[str, dict[str, object]]] = [
        ("/v1/generate", {"content": "{"}),
        ("/v1/generate", {"json": {}}),
        ("/v1/generate", {"content": b" " * 70_000}),
        ("/v1/generate", {"json": foreign}),
        ("/v1/upscale", {"json": {"image_id": "img_" + UNKNOWN}}),
    ]
    for count, (path, body) in enumerate(tries, start=1):
        answer = await house.client.post(path, headers=member.a, **body)  # pyright: ignore[reportArgumentType]
        assert standing(answer)[1] == 50 - count


async def test_a_stranger_s_requests_count_for_nobody(house: House) -> None:
    member = await house.member(plan_a="basic")
    for _ in range(5):
        await house.client.post("/v1/generate", json=BODY_A, headers={"Authorization": f"Bearer {member.key}x"})
        await house.client.post("/v1/generate", json=BODY_A, headers=member.a | {"X-API-Key": "x"})
        await house.client.delete("/v1/generate", headers=member.a)
        await house.client.get("/v1/nothing", headers=member.a)
    assert standing(await cheap(house, member, A))[1] == 49


async def test_the_limit_is_the_account_s_not_the_key_s(house: House) -> None:
    member = await house.member(plan_b="free")
    keys = [await house.key(member.account) for _ in range(4)]
    for count, key in enumerate([*keys, *keys], start=1):
        answer = await house.client.get("/v1/models", headers={"X-API-Key": key})
        assert standing(answer)[1] == 10 - count


async def test_the_interfaces_are_counted_apart(house: House) -> None:
    member = await house.member(plan_a="basic", plan_b="basic")
    for _ in range(3):
        await cheap(house, member, A)
    assert standing(await cheap(house, member, B))[:2] == (30, 29)
    assert standing(await cheap(house, member, A))[:2] == (50, 46)


async def test_accounts_are_counted_apart(house: House) -> None:
    first, second = await house.member(plan_b="free"), await house.member(plan_b="free")
    for _ in range(11):
        await cheap(house, first, B)
    assert (await cheap(house, second, B)).status_code == 200


async def test_a_change_of_plan_holds_from_the_next_request(house: House) -> None:
    member = await house.member(plan_b="free")
    while (await cheap(house, member, B)).status_code != 429:
        pass
    await house.resources.accounts.set_plans(member.account.id, plan_b="premium")
    assert standing(await cheap(house, member, B))[:2] == (100, 89)


async def test_the_reset_time_is_one_value_within_a_window(house: House) -> None:
    """Told to the millisecond by the store: rounded to seconds, a wavering end would show once in hundreds of windows."""
    member = await house.member(plan_a="basic")
    job_id = await house.submit(member)
    polls = [await house.client.get(f"/v1/generate/{job_id}", headers=member.a) for _ in range(20)]
    answers = [await cheap(house, member, A) for _ in range(60)]
    assert len({standing(answer)[2] for answer in (*polls, *answers)}) == 1
    ends = {(await house.resources.accounts.gate(member.key, A, counted=False)).window.resets_at for _ in range(20)}
    assert {ceil(end.timestamp()) for end in ends} == {standing(answers[0])[2]}
    assert len(ends) == 1


async def test_a_full_queue_is_a_429_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = house_settings(tmp_path_factory.mktemp("narrow"), [], max_queued_per_account=2)
    async with open_house(settings) as narrow:
        member = await narrow.member()
        jobs = [await narrow.submit(member, A), await narrow.submit(member, B)]
        for variant, body in ((A, BODY_A), (B, BODY_B)):
            answer = await narrow.client.post("/v1/generate", json=body, headers=member.headers(variant))
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            assert standing(answer)[1] > 0
        foreign = await narrow.client.post("/v1/generate", json=BODY_A | {"lora_id": "x"}, headers=member.a)
        missing = await narrow.client.post("/v1/upscale", json={"image_id": "x"}, headers=member.a)
        assert (foreign.status_code, missing.status_code) == (403, 404), "both come before the queue"
        await narrow.complete(jobs[0])
        await narrow.submit(member, A)
    stop_redis(settings.data_dir)
