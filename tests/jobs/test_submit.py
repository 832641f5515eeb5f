"""Taking requests in: permission, one durable accept, a hint that may fail."""

import time
from typing import Any

import pytest

from serve_app.domain.accounts import BUILTIN_PLANS, Caller, Plan
from serve_app.domain.errors import (
    InvalidParameter,
    QueueFull,
)
from serve_app.domain.jobs import JobKind, StoredImage
from serve_app.domain.requests import GenerationRequest, LoraUse, UpscaleDraft, UpscaleRequest, Variant
from serve_app.jobs.submit import ONE_DAY, USUAL_JOB_BYTES, Call, plan_queue_share
from serve_app.settings import Settings
from serve_app.store import measures as redis_memory
from serve_app.store.keys import redis_key
from tests.composition import Resources, open_resources
from tests.made_jobs import caller_of, claim, draft_of, job_of, put, stored_image
from tests.support import adapter_id, existing, memory_limit, wait_until

REQUEST = GenerationRequest(prompt="a boat", loras=(LoraUse(adapter_id("neon")),), seeds=(7,))
DRAFT = draft_of(REQUEST)


@pytest.fixture
async def caller(resources: Resources) -> Caller:
    return await caller_of(resources)


async def _stored(resources: Resources, caller: Caller, *, width: int = 512, height: int = 512) -> StoredImage:
    """An image that the caller's account has made."""
    accepted = await resources.submission.submit(caller, DRAFT)
    (claimed,) = await claim(resources)
    uri = await put(resources, accepted.job.id, account_id=caller.account_id, when=accepted.job.created_at)
    image = stored_image(uri, width=width, height=height)
    await resources.queue.finish(claimed.lease, [image], seconds=1)
    return image


async def test_a_generation_waits_in_the_group_of_its_weights(resources: Resources, caller: Caller) -> None:
    accepted = await resources.submission.submit(caller, DRAFT)
    assert accepted.job.id.startswith("gen_")
    (claimed,) = await claim(resources)
    adapter = existing(await resources.catalog.adapter(REQUEST.lora_id))
    assert (claimed.weights, claimed.account_id, claimed.request) == (adapter.sha256, caller.account_id, REQUEST)


async def test_an_upscale_is_of_a_stored_image(resources: Resources, caller: Caller) -> None:
    image = await _stored(resources, caller)
    accepted = await resources.submission.submit(caller, UpscaleDraft(image_id=image.image_id, scale_factor=4))
    assert accepted.job.id.startswith("up_")
    job = await job_of(resources, accepted.job.id)
    assert job.request == UpscaleRequest(
        image_id=image.image_id, scale_factor=4, source_uri=image.image_uri, source_width=512, source_height=512,
        from_upload=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "height", "factor", "is_taken"),
    [(1000, 1000, 4, True), (1000, 1001, 4, False), (2048, 2048, 2, False), (4000, 1000, 2, True)],
)
async def test_an_upscale_is_at_most_sixteen_megapixels(
    resources: Resources, caller: Caller, width: int, height: int, factor: int, is_taken: bool
) -> None:
    image = await _stored(resources, caller, width=width, height=height)
    if is_taken:
        await resources.submission.submit(caller, UpscaleDraft(image_id=image.image_id, scale_factor=factor))
        return
    with pytest.raises(InvalidParameter, match="16 megapixels"):
        await resources.submission.submit(caller, UpscaleDraft(image_id=image.image_id, scale_factor=factor))


async def test_the_hint_is_sent_once_and_may_fail(settings: Settings, resources: Resources, caller: Caller) -> None:
    hints: list[tuple[str, str]] = []

    async def hint(kind: str, job_id: str) -> None:
        hints.append((kind, job_id))
        raise RuntimeError("no replica there")

    async with open_resources(settings, hint=hint) as hinting:
        accepted = await hinting.submission.submit(caller, DRAFT, Call(idempotency_key="k"))
        again = await hinting.submission.submit(caller, DRAFT, Call(idempotency_key="k"))
        await wait_until(lambda: hints)
    assert again.replayed
    assert hints == [(JobKind.GENERATION, accepted.job.id)]


def test_a_higher_plan_has_a_larger_share_but_not_all() -> None:
    shares = {(plan.variant, plan.name): plan_queue_share(plan, BUILTIN_PLANS) for plan in BUILTIN_PLANS}
    assert shares[Variant.A, "basic"] == shares[Variant.B, "free"] == 1
    assert shares[Variant.A, "professional"] == 2
    assert 4 < shares[Variant.A, "enterprise"] < 5
    huge = Plan(Variant.A, "huge", 10**9, BUILTIN_PLANS[0].window)
    assert plan_queue_share(huge, (*BUILTIN_PLANS, huge)) == 8


async def test_an_account_may_store_its_share_of_redis_and_never_less_than_its_plan_admits(
    resources: Resources, caller: Caller, redis_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_memory, "CHECK_EVERY_S", 0.0)
    life = resources.settings.longest_record_life + ONE_DAY
    admitted = caller.plan.requests_in(life) * USUAL_JOB_BYTES
    assert admitted == 50 * 24 * 33 * USUAL_JOB_BYTES
    stored, day = redis_key("stored", caller.account_id, Variant.A), str(int(time.time() // 86_400))
    for share, most in ((0.001, admitted), (0.5, 4 << 30)):
        service = resources.with_parts(settings=resources.settings.model_copy(update={"account_share": share}))
        with memory_limit(redis_db, 8 << 30):
            redis_db.hset(stored, day, most - 1)
            await service.submission.submit(caller, DRAFT)
            with pytest.raises(QueueFull, match="share of the service's memory"):
                await service.submission.submit(caller, DRAFT)
    await resources.submission.submit(caller, DRAFT)  # of a Redis without a limit, nobody has a share
