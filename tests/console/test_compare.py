"""Comparing: a form makes one job for each chosen LoRA, with one seed; the page shows them side by side."""

import pytest

from serve_app.domain.accounts import Account
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service.resources import Resources
from tests.api.app import LORA, TestService
from tests.console.browser import Browser
from tests.console.conftest import PASSWORD, Browsers
from tests.support import adapter_id

BOTH = {f"lora:{LORA}": "yes", f"lora:{adapter_id('neon')}": "yes"}
FIELDS = {"prompt": "a red boat", "lora_weight": "0.75", "size": "512x512", "steps": "20", "guidance_scale": "7.5"}


@pytest.mark.slow
async def test_each_chosen_lora_is_a_job_with_the_same_seed(
    browser: Browser, browsers: Browsers, service: TestService, owner: Account
) -> None:
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"], "seed": ""}
    page = await browser.send(form, **FIELDS, **BOTH)
    assert page.status == 200
    jobs = await service.resources.jobs.list(owner.id)
    requests = [job.request for job in jobs if isinstance(job.request, GenerationRequest)]
    assert {each.lora_id for each in requests} == {LORA, adapter_id("neon")}
    assert len({each.seeds for each in requests}) == 1
    assert "0 of 2 finished" in page.text
    done = await service.complete(jobs[0].id)
    path = f"/console/compare/grid?jobs={jobs[0].id},{jobs[1].id},gen_nonsense"
    grid = await browser.open(path)
    assert "1 of 2 finished" in grid.text
    assert f"/console/history/{done.id}/{done.images[0].image_id}" in {a.get("src") for _, a in grid.tags}
    await service.resources.accounts.create("other", password=PASSWORD)
    other = browsers.new()
    await other.sign_in("other", PASSWORD)
    assert (await other.http.get(path)).status_code == 404
    assert done.id not in (await other.http.get(f"/console/compare?jobs={done.id}")).text


@pytest.mark.slow
async def test_a_comparison_that_the_plan_does_not_leave_is_refused_whole(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"], "seed": ""}
    one = await browser.send(form, **FIELDS, **dict(list(BOTH.items())[:1]))
    assert (one.status, "two to 8" in one.text) == (400, True)
    for _ in range((await resources.auth.window(owner.id, Variant.A)).remaining - 1):
        await resources.auth.count_owner(owner.id, Variant.A)
    assert (await browser.send(form, **FIELDS, **BOTH)).status == 429
    assert await resources.jobs.list(owner.id) == []
