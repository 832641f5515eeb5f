"""Taking requests in: permission, one durable accept, a hint that may fail."""

import asyncio
import time
from dataclasses import replace
from typing import Any, cast

import pytest
import redis

from serve_app.domain.accounts import BUILTIN_PLANS, Caller, Plan
from serve_app.domain.errors import (
    AtelierError,
    FailureCode,
    Forbidden,
    InvalidParameter,
    NotFound,
    QueueFull,
    StoreUnavailable,
)
from serve_app.domain.jobs import Failure, JobKind, NewJob, StoredImage, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, UpscaleRequest, Variant
from serve_app.jobs.submit import ONE_DAY, USUAL_JOB_BYTES, Call, plan_queue_share
from serve_app.settings import Settings
from serve_app.store import measures as redis_memory
from serve_app.store.keys import redis_key
from tests.composition import Resources, open_resources
from tests.support import PRIVATE_ADAPTER, adapter_id, wait_until

REQUEST = GenerationRequest(prompt="a boat", lora_id=adapter_id("neon"), seeds=(7,))


@pytest.fixture
async def secret(resources: Resources) -> str:
    account = await resources.accounts.create("acme")
    return (await resources.api_keys.create(account.id, interfaces=frozenset(Variant)))[1]


@pytest.fixture
async def caller(resources: Resources, secret: str) -> Caller:
    return await _call(resources, secret)


async def _call(resources: Resources, secret: str) -> Caller:
    auth = await resources.auth.authenticate(secret, Variant.A, counted=True)
    assert auth.caller is not None
    return auth.caller


async def _stored(resources: Resources, caller: Caller, *, width: int = 512, height: int = 512) -> StoredImage:
    """An image that the caller's account has made."""
    accepted = await resources.submission.generate(caller, REQUEST)
    (claim,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_image_id())
    name = resources.images.object_name(caller.account_id, accepted.job.id, 1, 0, accepted.job.created_at)
    uri = await resources.images.put(name, b"png")
    image = StoredImage(
        image_id=new_image_id(), image_uri=uri, width=width, height=height, sha256="0" * 64, size_bytes=3
    )
    await resources.queue.finish(claim.lease, [image], seconds=1)
    return image


async def test_a_generation_waits_in_the_group_of_its_weights(resources: Resources, caller: Caller) -> None:
    accepted = await resources.submission.generate(caller, REQUEST)
    assert accepted.job.id.startswith("gen_")
    (claim,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce="n")
    adapter = await resources.catalog.adapter(REQUEST.lora_id)
    assert adapter is not None
    assert (claim.group, claim.account_id, claim.request) == (adapter.sha256, caller.account_id, REQUEST)


async def test_a_comparison_is_accepted_whole_and_counted_as_so_many_requests(
    resources: Resources, caller: Caller
) -> None:
    asked = [replace(REQUEST, lora_weight=weight) for weight in (0.25, 0.5, 1.0)]
    before = (await resources.auth.window(caller.account_id, Variant.A)).remaining
    assert len(await resources.submission.generate_all(caller, asked)) == len(asked)
    assert (await resources.auth.window(caller.account_id, Variant.A)).remaining == before - 3
    (first, *others) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce="n", limit=8)
    assert [claim.request for claim in (first, *others)] == asked
    assert len({claim.group for claim in (first, *others)}) == 1
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="ours")
    await resources.queue.fail(first.lease, failure, retry=False)
    assert (await resources.auth.window(caller.account_id, Variant.A)).remaining == before - 2, "one is given back"


async def test_a_comparison_whose_reply_was_lost_is_made_once(resources: Resources, caller: Caller) -> None:
    job_ids = [new_job_id(JobKind.GENERATION) for _ in range(2)]
    args: dict[str, Any] = {"variant": Variant.A, "account_id": caller.account_id, "plan": caller.plan.name}
    new = [NewJob(job_id=each, request=REQUEST, adapter_id=REQUEST.lora_id, **args) for each in job_ids]
    before = (await resources.auth.window(caller.account_id, Variant.A)).remaining
    once, again = [await resources.queue.accept_all(new) for _ in range(2)]
    assert [job.id for job in once] == [job.id for job in again] == job_ids
    assert (await resources.auth.window(caller.account_id, Variant.A)).remaining == before - 2
    assert len(await resources.job_history.list(caller.account_id)) == 2


async def test_a_comparison_that_cannot_be_accepted_whole_leaves_nothing(
    settings: Settings, redis_db: redis.Redis
) -> None:
    limits = {"max_queued": 4, "max_queued_per_account": 3}
    async with open_resources(settings.model_copy(update=limits)) as resources:
        account = await resources.accounts.create("acme")
        plan = settings.plan_named(Variant.A, account.plan_a)
        caller = Caller(account_id=account.id, account_name="acme", key_id="", variant=Variant.A, plan=plan)

        async def refused(*asked: GenerationRequest) -> str:
            with pytest.raises(AtelierError) as error:
                await resources.submission.generate_all(caller, asked)
            assert await resources.job_history.list(account.id) == []
            return type(error.value).__name__

        before = (await resources.auth.window(account.id, Variant.A)).remaining
        foreign = replace(REQUEST, lora_id=PRIVATE_ADAPTER)
        assert await refused(REQUEST, foreign) == "Forbidden"
        assert await refused(*[REQUEST] * 4) == "QueueFull", "of the account"
        assert await refused(*[REQUEST] * 5) == "QueueFull"
        assert (await resources.auth.window(account.id, Variant.A)).remaining == before, "nothing is counted"
        for _ in range(before - 1):
            await resources.auth.count_owner(account.id, Variant.A)
        assert await refused(REQUEST, REQUEST) == "RateLimitExceeded"
        await resources.accounts.set_disabled(account.id, True)
        assert await refused(REQUEST) == "Forbidden"
        await resources.accounts.set_disabled(account.id, False)
        assert len(await resources.submission.generate_all(caller, [REQUEST])) == 1


async def test_an_unknown_lora_and_a_foreign_one_are_refused_alike(resources: Resources, caller: Caller) -> None:
    messages: set[str] = set()
    for lora_id in ("model_unknown", PRIVATE_ADAPTER):
        with pytest.raises(Forbidden) as refused:
            await resources.submission.generate(caller, replace(REQUEST, lora_id=lora_id))
        messages.add(refused.value.message)
    assert len(messages) == 1


async def test_an_adapter_of_the_accounts_own_is_taken_by_name_and_by_grant(
    resources: Resources, caller: Caller
) -> None:
    private = replace(REQUEST, lora_id=PRIVATE_ADAPTER)
    owner = await resources.accounts.create("owner")
    await resources.submission.generate(replace(caller, account_id=owner.id, account_name="owner"), private)
    await resources.adapter_grants.grant(PRIVATE_ADAPTER, caller.account_id)
    await resources.submission.generate(caller, private)


async def test_a_denial_holds_from_the_next_accept_for_a_caller_who_is_authenticated(
    resources: Resources, caller: Caller
) -> None:
    """Permission is decided at the accept: nothing that was read before it counts."""
    await resources.submission.generate(caller, REQUEST, Call(idempotency_key="k"))
    await resources.adapter_grants.revoke(REQUEST.lora_id, caller.account_id)
    for key in (None, "k"):
        with pytest.raises(Forbidden):
            await resources.submission.generate(caller, REQUEST, Call(idempotency_key=key))
    assert len(await resources.job_history.list(caller.account_id)) == 1


async def test_an_upscale_is_of_the_callers_own_stored_image(resources: Resources, caller: Caller) -> None:
    image = await _stored(resources, caller)
    accepted = await resources.submission.upscale(caller, image.image_id, 4)
    assert accepted.job.id.startswith("up_")
    job = await resources.jobs.find(accepted.job.id)
    assert job is not None
    assert job.request == UpscaleRequest(
        image_id=image.image_id, scale_factor=4, source_uri=image.image_uri, source_width=512, source_height=512
    )
    for other in (replace(caller, account_id="acct_other"), replace(caller, variant=Variant.B)):
        with pytest.raises(NotFound):
            await resources.submission.upscale(other, image.image_id)
    with pytest.raises(NotFound):
        await resources.submission.upscale(caller, "img_unknown")
    await resources.images.delete(image.image_uri)
    with pytest.raises(NotFound):
        await resources.submission.upscale(caller, image.image_id)


@pytest.mark.parametrize(
    ("width", "height", "factor", "is_taken"),
    [(1000, 1000, 4, True), (1000, 1001, 4, False), (2048, 2048, 2, False), (4000, 1000, 2, True)],
)
async def test_an_upscale_is_at_most_sixteen_megapixels(
    resources: Resources, caller: Caller, width: int, height: int, factor: int, is_taken: bool
) -> None:
    image = await _stored(resources, caller, width=width, height=height)
    if is_taken:
        await resources.submission.upscale(caller, image.image_id, factor)
        return
    with pytest.raises(InvalidParameter, match="16 megapixels"):
        await resources.submission.upscale(caller, image.image_id, factor)


async def test_a_caller_that_disconnects_does_not_stop_the_accept(resources: Resources, caller: Caller) -> None:
    posting = asyncio.create_task(resources.submission.generate(caller, REQUEST))
    await asyncio.sleep(0)  # begun, and now the client is gone
    posting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await posting

    async def is_accepted() -> bool:
        return (await resources.queue_stats.backlog(JobKind.GENERATION)).ready == 1

    await wait_until(is_accepted)


async def test_the_hint_is_sent_once_and_may_fail(settings: Settings, resources: Resources, caller: Caller) -> None:
    hints: list[tuple[JobKind, str]] = []

    async def hint(kind: JobKind, job_id: str) -> None:
        hints.append((kind, job_id))
        raise RuntimeError("no replica there")

    async with open_resources(settings, hint=hint) as hinting:
        accepted = await hinting.submission.generate(caller, REQUEST, Call(idempotency_key="k"))
        again = await hinting.submission.generate(caller, REQUEST, Call(idempotency_key="k"))
        await wait_until(lambda: hints)
    assert again.replayed
    assert hints == [(JobKind.GENERATION, accepted.job.id)]


async def test_a_job_that_failed_by_our_fault_refunds_its_request(resources: Resources, secret: str) -> None:
    caller = await _call(resources, secret)
    await resources.submission.generate(caller, REQUEST)
    assert (await resources.auth.window(caller.account_id, Variant.A)).remaining == 49
    (claim,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce="n")
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="the device failed")
    await resources.queue.fail(claim.lease, failure, retry=False)
    assert (await resources.auth.window(caller.account_id, Variant.A)).remaining == 50


async def test_a_canceled_job_stays_counted(resources: Resources, secret: str) -> None:
    caller = await _call(resources, secret)
    job = (await resources.submission.generate(caller, REQUEST)).job
    await resources.queue.cancel(job.id, account_id=caller.account_id)
    assert (await resources.auth.window(caller.account_id, Variant.A)).remaining == 49


def test_a_higher_plan_has_a_larger_share_but_not_all() -> None:
    shares = {(plan.variant, plan.name): plan_queue_share(plan, BUILTIN_PLANS) for plan in BUILTIN_PLANS}
    assert shares[Variant.A, "basic"] == shares[Variant.B, "free"] == 1
    assert shares[Variant.A, "professional"] == 2
    assert 4 < shares[Variant.A, "enterprise"] < 5
    huge = Plan(Variant.A, "huge", 10**9, BUILTIN_PLANS[0].window)
    assert plan_queue_share(huge, (*BUILTIN_PLANS, huge)) == 8


async def test_a_store_that_is_down_is_reported_as_such(
    resources: Resources, caller: Caller, redis_db: redis.Redis
) -> None:
    redis_db.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await resources.submission.generate(caller, REQUEST)
    finally:
        redis_db.config_set("maxmemory", "0")
    assert await resources.job_history.list(caller.account_id) == []


async def test_an_account_may_store_its_share_of_redis_and_never_less_than_its_plan_admits(
    resources: Resources, caller: Caller, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_memory, "CHECK_EVERY_S", 0.0)
    life = resources.settings.longest_record_life + ONE_DAY
    admitted = caller.plan.requests_in(life) * USUAL_JOB_BYTES
    assert admitted == 50 * 24 * 33 * USUAL_JOB_BYTES
    stored, day = redis_key("stored", caller.account_id, Variant.A), str(int(time.time() // 86_400))
    untyped = cast(Any, redis_db)
    for share, most in ((0.001, admitted), (0.5, 4 << 30)):
        service = resources.with_parts(settings=resources.settings.model_copy(update={"account_share": share}))
        untyped.config_set("maxmemory", 8 << 30)
        try:
            untyped.hset(stored, day, most - 1)
            await service.submission.generate(caller, REQUEST)
            with pytest.raises(QueueFull, match="share of the service's memory"):
                await service.submission.generate(caller, REQUEST)
        finally:
            untyped.config_set("maxmemory", 0)
    await resources.submission.generate(caller, REQUEST)  # of a Redis without a limit, nobody has a share
