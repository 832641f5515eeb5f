"""A comparison makes a job for each chosen LoRA, with one seed, and shows them side by side."""

import pytest

from serve_app.domain.accounts import Account
from serve_app.domain.requests import GenerationRequest, Variant
from tests.api.app import LORA, Member, TestService
from tests.composition import Resources
from tests.support import adapter_id, adapter_of
from tests.web.browser import Browser
from tests.web.conftest import PASSWORD, Browsers

BOTH = {f"lora:{LORA}": "yes", f"lora:{adapter_id('neon')}": "yes"}
FIELDS = {"prompt": "a red boat", "lora_weight": "0.75", "steps": "20", "guidance_scale": "7.5"}


@pytest.mark.slow
async def test_each_chosen_lora_is_a_job_with_the_same_seed(
    browser: Browser, browsers: Browsers, service: TestService, owner: Account
) -> None:
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"], "seed": ""}
    page = await browser.send(form, **FIELDS, **BOTH)
    assert page.status == 200
    jobs = await service.resources.job_history.list(owner.id)
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
    other = await browsers.signed_in("other")
    assert (await other.http.get(path)).status_code == 404
    assert done.id not in (await other.http.get(f"/console/compare?jobs={done.id}")).text


@pytest.mark.slow
async def test_own_loras_come_first_and_a_choice_of_none_stays(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    await resources.adapter_registry.register(adapter_of(owner.id, name="Own"))
    page = await browser.open("/console/compare?lora_id=model_gone")
    assert "may not use model_gone" in page.text
    boxes = [a for _, a in (await browser.open("/console/compare")).tags if a.get("name", "").startswith("lora:")]
    names = {each.id: each.name for each in await resources.catalog.adapters(owner.id)}
    assert names[boxes[0]["name"][5:]] == "Own"
    assert len([box for box in boxes if "checked" in box]) == 4
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"]}
    refused = await browser.send(form, **FIELDS)
    assert not [a for _, a in refused.tags if "checked" in a and a.get("name", "").startswith("lora:")]


@pytest.mark.slow
async def test_a_comparison_that_the_plan_does_not_leave_is_refused_whole(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"], "seed": ""}
    for wrong, words in (
        ({}, "2 to 8 LoRAs"),
        ({"across": "weights", "weights": "0.5"}, "2 to 16 pictures, and this one 1"),
        ({"across": "weights", "weights": "a"}, "Weights: must be one to 8 numbers"),
        ({"across": "weights", "weights": "0.5, 3"}, "LoRA 1, weight: must be"),
        ({"across": "seeds", "seeds": "9"}, "Seeds: must be a whole number between 1 and 8"),
    ):
        one = await browser.send(form, **FIELDS, **dict(list(BOTH.items())[:1]), **wrong)
        assert (one.status, words in one.text) == (400, True), words
    for _ in range((await resources.auth.window(owner.id, Variant.A)).remaining - 1):
        await resources.auth.count_owner(owner.id, Variant.A)
    assert (await browser.send(form, **FIELDS, **BOTH)).status == 429
    assert await resources.job_history.list(owner.id) == []


@pytest.mark.slow
async def test_what_a_comparison_created_before_a_refusal_is_shown_with_the_reason(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"], "seed": ""}
    page = await browser.send(form, **FIELDS, **BOTH, **{"lora:model_of_nobody": "yes"})
    assert (page.status, "LoRA 1: must be a LoRA that you may use" in page.text, "0 of 2 finished" in page.text) == (
        403,
        True,
        True,
    )
    jobs = await resources.job_history.list(owner.id)
    assert {job.id[:4] for job in jobs} == {"job_"}
    [grid] = [a["hx-get"] for _, a in page.tags if "/compare/grid" in a.get("hx-get", "")]
    assert grid.endswith(",".join(job.id for job in reversed(jobs)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("across", "columns"),
    [
        ({"across": "weights", "weights": "0.25; 1, .5"}, ["Weight 0.25", "Weight 1", "Weight 0.5"]),
        ({"across": "seeds", "seeds": "2"}, ["Seed 41", "Seed 42"]),
    ],
)
async def test_loras_across_weights_or_seeds_are_a_table_of_rows_and_columns(
    browser: Browser, resources: Resources, owner: Account, across: dict[str, str], columns: list[str]
) -> None:
    form = (await browser.open("/console/compare")).form("Compare")
    form.fields = {"form_token": form.fields["form_token"], "seed": "41"}
    before = (await resources.auth.window(owner.id, Variant.A)).remaining
    page = await browser.send(form, **{**FIELDS, **BOTH, **across})
    jobs = await resources.job_history.list(owner.id)
    assert (await resources.auth.window(owner.id, Variant.A)).remaining == before - len(jobs)
    assert len(jobs) == 2 * len(columns)
    assert f"0 of {len(jobs)} finished" in page.text
    assert " ".join([*columns, "Outline"]) in page.text
    assert len([tag for tag, attributes in page.tags if tag == "th" and attributes.get("scope") == "row"]) == 2
    asked = [job.request for job in reversed(jobs) if isinstance(job.request, GenerationRequest)]
    assert len({(each.lora_id, each.lora_weight, each.seeds) for each in asked}) == len(jobs)
    assert ({each.seeds for each in asked} == {(41,)}) == (across["across"] == "weights")
    checked = [a["value"] for _, a in page.tags if a.get("name") == "across" and "checked" in a]
    assert checked == [across["across"]], "the form stays as it was"


@pytest.mark.slow
async def test_jobs_that_make_no_grid_are_tiles(browser: Browser, service: TestService, owner: Account) -> None:
    """Links of earlier versions name such jobs."""
    member = Member(owner, await service.key(owner))
    ids = [await service.submit(member, seed=seed, lora_weight=weight) for seed, weight in ((1, 0.5), (2, 1.0))]
    page = await browser.open(f"/console/compare?jobs={','.join(ids)}")
    assert "0 of 2 finished" in page.text
    assert not [tag for tag, _ in page.tags if tag == "table"]
