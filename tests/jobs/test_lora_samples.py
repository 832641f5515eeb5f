"""A LoRA's sample picture: drawn when nothing else waits, for its account, and on no account's bill."""

from datetime import UTC, datetime, timedelta

import pytest

from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import JobKind, NewJob, StoredImage, new_image_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.jobs.queue import new_nonce
from tests.composition import Resources
from tests.support import adapter_id

AT_ONCE = timedelta(milliseconds=1)


@pytest.fixture
async def mine(resources: Resources) -> Adapter:
    """A LoRA of an account, whose sample is asked for; a worker has been seen."""
    acme = await resources.accounts.create("acme")
    adapter = Adapter(
        id="model_" + "mine".ljust(26, "2"), name="Ink", description="", created_at=datetime.now(UTC), file="memory://ink", sha256="0" * 64,
        base_model="pocket", owner=acme.id, accounts=frozenset(), trigger_words=("ink drawing",),
    )  # fmt: skip
    await resources.adapter_registry.register(adapter)
    await resources.registration.ask_for_sample(adapter)
    return adapter


async def _claim(resources: Resources) -> list[str]:
    claims = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce(), limit=8)
    return [claim.lease.job_id for claim in claims]


async def test_a_sample_is_an_ordinary_job_of_its_account_that_counts_nowhere(
    resources: Resources, mine: Adapter
) -> None:
    assert await resources.for_housekeeping.samples.draw_next() == "", (
        "no worker is running: none is started for a sample"
    )
    assert await _claim(resources) == []
    job_id = await resources.for_housekeeping.samples.draw_next(every=AT_ONCE)
    [claim] = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
    assert (claim.lease.job_id, claim.account_id) == (job_id, mine.owner)
    assert isinstance(claim.request, GenerationRequest)
    assert (claim.request.prompt, claim.request.lora_id) == (
        "purple mountains under a black sky with a yellow moon, ink drawing",
        mine.id,
    )
    image = StoredImage(
        image_id=new_image_id(), image_uri="memory://0", width=512, height=512, sha256="0" * 64, size_bytes=9
    )
    await resources.queue.finish(claim.lease, [image], seconds=1)
    assert (await resources.job_history.page(mine.owner, limit=5)).jobs[0].images == (image,)
    assert await resources.usage.days(mine.owner, await resources.usage.today(), 1) == []
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == "", "one for each registration"


async def test_a_sample_waits_for_everybody_elses_jobs(resources: Resources, mine: Adapter) -> None:
    await _claim(resources)
    waiting = await resources.queue.accept(NewJob(
        job_id="gen_other", variant=Variant.A, account_id="other", adapter_id=adapter_id("neon"),
        request=GenerationRequest(prompt="a boat", lora_id=adapter_id("neon"), seeds=(1,)),
    ))  # fmt: skip
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
    assert await _claim(resources) == [waiting.job.id]
    assert await resources.for_housekeeping.samples.draw_next(every=timedelta(minutes=1))
    await resources.registration.ask_for_sample(mine)
    await _claim(resources)
    assert await resources.for_housekeeping.samples.draw_next(every=timedelta(minutes=1)) == "", (
        "one after the other, in their time"
    )


async def test_no_sample_is_drawn_of_what_is_gone_or_where_samples_are_off(resources: Resources, mine: Adapter) -> None:
    await _claim(resources)
    off = resources.with_parts(settings=resources.settings.model_copy(update={"lora_samples": False}))
    assert await off.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
    await off.registration.ask_for_sample(mine)
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
    await resources.registration.ask_for_sample(mine)
    await resources.adapter_registry.remove(mine.id)
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
