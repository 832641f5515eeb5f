"""A LoRA's sample picture: drawn when nothing else waits, for its account, and on no account's bill."""

from datetime import timedelta
from typing import Any

import pytest

from serve_app.domain.catalog import Adapter
from serve_app.domain.requests import GenerationRequest
from tests.composition import Resources
from tests.made_jobs import accept, claim, finish
from tests.support import adapter_of, change_base_model

AT_ONCE = timedelta(milliseconds=1)


@pytest.fixture
async def mine(resources: Resources) -> Adapter:
    """A LoRA of an account, whose sample is asked for; a worker has been seen."""
    acme = await resources.accounts.create("acme")
    adapter = adapter_of(acme.id, trigger_words=("ink drawing",))
    await resources.adapter_registry.register(adapter)
    await resources.registration.ask_for_sample(adapter)
    return adapter


async def test_a_sample_is_an_ordinary_job_of_its_account_that_counts_nowhere(
    resources: Resources, mine: Adapter
) -> None:
    assert await resources.for_housekeeping.samples.draw_next() == "", (
        "no worker is running: none is started for a sample"
    )
    assert await claim(resources) == []
    job_id = await resources.for_housekeeping.samples.draw_next(every=AT_ONCE)
    [claimed] = await claim(resources)
    assert (claimed.lease.job_id, claimed.account_id) == (job_id, mine.owner)
    assert isinstance(claimed.request, GenerationRequest)
    assert (claimed.request.prompt, claimed.request.lora_id) == (
        "purple mountains under a black sky with a yellow moon, ink drawing",
        mine.id,
    )
    images = await finish(resources, claimed)
    assert (await resources.job_history.page(mine.owner, limit=5)).jobs[0].images == tuple(images)
    assert await resources.usage.days(mine.owner, await resources.usage.today(), 1) == []
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == "", "one for each registration"


async def test_a_sample_waits_for_everybody_elses_jobs(resources: Resources, mine: Adapter) -> None:
    await claim(resources)
    waiting = await accept(resources, "other")
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
    assert [each.lease.job_id for each in await claim(resources)] == [waiting]
    assert await resources.for_housekeeping.samples.draw_next(every=timedelta(minutes=1))
    await resources.registration.ask_for_sample(mine)
    await claim(resources)
    assert await resources.for_housekeeping.samples.draw_next(every=timedelta(minutes=1)) == "", (
        "one after the other, in their time"
    )


async def test_no_sample_is_drawn_of_what_is_gone_or_where_samples_are_off(resources: Resources, mine: Adapter) -> None:
    await claim(resources)
    off = resources.with_parts(settings=resources.settings.model_copy(update={"lora_samples": False}))
    assert await off.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
    await off.registration.ask_for_sample(mine)
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""
    await resources.registration.ask_for_sample(mine)
    await resources.adapter_registry.remove(mine.id)
    assert await resources.for_housekeeping.samples.draw_next(every=AT_ONCE) == ""


@pytest.mark.parametrize(("wanted", "drawn"), [({}, (20, 7.5)), ({"steps": 8, "guidance": 1}, (8, 1.0))])
async def test_a_sample_is_drawn_with_the_steps_and_guidance_that_its_base_model_wants(
    resources: Resources, mine: Adapter, wanted: dict[str, Any], drawn: tuple[int, float]
) -> None:
    change_base_model(resources.settings.catalog, **wanted)
    await resources.applied_catalog.apply_file()
    await claim(resources)
    await resources.for_housekeeping.samples.draw_next(every=AT_ONCE)
    [claimed] = await claim(resources)
    assert isinstance(claimed.request, GenerationRequest)
    assert (claimed.request.steps, claimed.request.guidance_scale) == drawn
