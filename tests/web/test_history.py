"""The history shows an account's own jobs and images, and nothing as markup."""

import json
import shlex
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import redis

from serve_app.domain.audit import OWNER, Act
from serve_app.domain.durations import epoch_ms
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, Job, JobKind, JobState, new_job_id
from serve_app.domain.requests import GenerationRequest, ImageFormat, UpscaleRequest, Variant
from serve_app.jobs import history as job_history
from serve_app.store.keys import redis_key
from serve_app.web.console import history
from tests.api.app import LORA, Member, TestService
from tests.composition import Resources
from tests.made_jobs import accept, job_of
from tests.support import adapter_id
from tests.web.browser import Browser
from tests.web.conftest import Browsers

pytestmark = pytest.mark.slow


async def _done(service: TestService, member: Member, variant: Variant = Variant.A, **fields: object) -> Job:
    return await service.complete(await service.submit(member, variant, **fields))


async def test_the_history_lists_jobs_newest_first_in_pages(
    service: TestService, member: Member, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PAGE_SIZE", 2)
    prompts = ["first boat", "second boat", "third boat"]
    for prompt in prompts:
        await service.submit(member, prompt=prompt)
    page = await browser.open("/console/history")
    assert [prompt in page.text for prompt in prompts] == [False, True, True]
    assert page.text.index("third") < page.text.index("second")
    [older] = [link for link in page.links if "after=" in link]
    page = await browser.open(older)
    assert [prompt in page.text for prompt in prompts] == [True, False, False]
    assert not [link for link in page.links if "after=" in link]
    assert "first boat" not in (await browser.open("/console/history?after=nonsense")).text, "begins with the newest"


async def test_a_search_of_the_history_ends_and_offers_to_look_further_back(
    service: TestService, member: Member, browser: Browser, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job lies behind forty others that are gone, of which one call of the script sees 34."""
    monkeypatch.setattr(history, "LOOKED_AT", 2)
    monkeypatch.setattr(job_history, "LOOKED_AT_ONCE", 2)
    wanted = await _done(service, member, prompt="a finished boat")
    later_ms = epoch_ms(wanted.created_at) + 1_000
    newer = {new_job_id(JobKind.GENERATION): later_ms + number for number in range(40)}
    redis_db.zadd(redis_key("jobs", member.account.id), newer)
    page = await browser.open("/console/history?state=completed")
    assert "None of the 2 jobs that were searched matches." in page.text
    assert "Look further back" in page.text
    [further] = [link for link in page.links if "after=" in link]
    page = await browser.open(further)
    assert "a finished boat" in page.text
    assert "Look further back" not in page.text


async def test_the_history_is_filtered_by_lora_state_key_and_date(
    service: TestService, member: Member, browser: Browser
) -> None:
    done = await _done(service, member, prompt="a finished boat")
    other = Member(member.account, await service.key(member.account))
    await service.submit(other, prompt="a waiting boat", lora_id=adapter_id("neon"))
    day = f"{done.created_at:%Y-%m-%d}"
    cases = {
        "": "both",
        f"lora={LORA}": "finished",
        f"lora={adapter_id('neon')}": "waiting",
        "lora=+NEON+": "waiting",
        "lora=nothing": "none",
        "state=queued": "waiting",
        "state=completed": "finished",
        f"key={done.key_id}": "finished",
        f"from={day}&to={day}": "both",
        "to=2020-01-01": "none",
        "from=9999-12-31": "none",
        "state=nonsense&from=2026-02-31&to=x": "both",
    }
    for query, wanted in cases.items():
        text = (await browser.open(f"/console/history?{query}")).text
        found = {name for name in ("finished", "waiting") if f"a {name} boat" in text}
        assert found == ({"finished", "waiting"} if wanted == "both" else {wanted} - {"none"}), query


async def test_a_jobs_page_shows_its_images_parameters_and_times(
    service: TestService, member: Member, browser: Browser
) -> None:
    job = await _done(service, member, prompt="a boat", num_images=2, seed=7, steps=21, width=768)
    page = await browser.open(f"/console/history/{job.id}")
    for words in ("Done", "a boat", "Outline", "768 × 512", "21", "7, 8", "Waited", "Worker time", "0.5 s"):
        assert words in page.text, words
    images = [attributes for tag, attributes in page.tags if tag == "img" and job.id in attributes["src"]]
    assert [(image["width"], image["height"]) for image in images] == [("768", "512")] * 2
    answer = (await browser.open(images[0]["src"])).answer
    assert (answer.headers["content-type"], answer.content[:4]) == ("image/png", b"\x89PNG")
    [link, _] = [link for link in page.links if "download=yes" in link]
    disposition = (await browser.open(link)).answer.headers["content-disposition"]
    assert disposition == f'attachment; filename="{job.id}-1.png"'
    [playground] = [link for link in page.links if "/playground?" in link]
    assert parse_qs(urlsplit(playground).query)["seed"] == ["7"]


async def test_a_job_of_several_loras_is_shown_with_all_that_it_asked_for_and_made_again(
    service: TestService, member: Member, browser: Browser
) -> None:
    neon, prompt = adapter_id("neon"), " ".join(["a red boat"] * 20)
    asked: dict[str, Any] = {
        "prompt": prompt, "loras": [{"id": LORA, "weight": -0.5}, {"id": neon, "weight": 1.25}],
        "sampler": "dpm++2m-karras", "steps": 9, "width": 256, "seed": 7, "prompt_weights": True,
    }  # fmt: skip

    async def made(body: dict[str, Any]) -> Job:
        answer = await service.client.post("/v1/jobs", json=body, headers=member.b)
        return await service.complete(answer.json()["id"])

    job = await made(asked)
    page = await browser.open(f"/console/history/{job.id}")
    rows = f"LoRA Outline weight -0.5 {LORA} LoRA Neon weight 1.25 {neon}"
    for words in (f"... {prompt}", rows, "pocket", "dpm++2m-karras"):
        assert words in page.text, words
    words = shlex.split(page.text[page.text.index("curl http") : page.text.index(" This job")])
    body = json.loads(words[-1])
    assert (words[1][-8:], body) == ("/v1/jobs", asked | {"guidance_scale": 7.5, "height": 512})
    assert "X-API-Key: $ATELIER_KEY" in words
    assert (await made(body)).request == job.request
    plain = await made({"prompt": "a boat"})
    assert "pocket" in (await browser.open(f"/console/history/{plain.id}")).text
    shown = (await browser.open("/console/history")).text
    assert "Outline + Neon" in shown
    assert "LoRA removed" not in shown

    page = await browser.open(f"/console/playground/{job.id}")
    assert '"prompt_weights": True' in page.text
    await browser.send(page.form("Again with the next seed"), seed="next")
    await browser.send(page.form("Upscale 2×"), factor="2")
    enlarged, again = (await service.resources.job_history.list(member.account.id))[:2]
    assert isinstance(job.request, GenerationRequest)
    assert again.request == replace(job.request, seeds=(8,))
    compared = await browser.open(f"/console/compare?jobs={job.id},{again.id}")
    assert ("Outline + Neon" in compared.text, "1 of 2 finished" in compared.text) == (True, True)
    assert not [tag for tag, _ in compared.tags if tag == "table"], "a table has one LoRA in each row"
    assert isinstance(enlarged.request, UpscaleRequest)
    curl = (await browser.open(f"/console/history/{enlarged.id}")).text
    assert json.dumps({"kind": "upscale", "image_id": job.images[0].image_id})[:-1] in curl


async def test_an_image_of_another_format_is_downloaded_as_such(
    service: TestService, member: Member, browser: Browser
) -> None:
    asked = {"output_format": ImageFormat.JPEG, "width": 256}
    job = await service.complete(await accept(service.resources, member.account.id, **asked))
    page = await browser.open(f"/console/history/{job.id}")
    assert "Download JPEG" in page.text
    [link] = [link for link in page.links if "download=yes" in link]
    answer = (await browser.open(link)).answer
    assert (answer.headers["content-type"], answer.content[:3]) == ("image/jpeg", b"\xff\xd8\xff")
    assert answer.headers["content-disposition"] == f'attachment; filename="{job.id}-1.jpg"'
    opened = await service.client.get(service.resources.images.url(job.images[0].image_uri, base_url="http://test"))
    assert (opened.headers["content-type"], opened.content) == ("image/jpeg", answer.content)


async def test_the_list_shows_thumbnails_in_a_place_of_their_size(
    service: TestService, member: Member, browser: Browser
) -> None:
    await _done(service, member, width=768)
    page = await browser.open("/console/history")
    [thumbnail] = [attributes for _, attributes in page.tags if attributes.get("src", "").endswith("/thumbnail")]
    assert (thumbnail["width"], thumbnail["height"], thumbnail["loading"]) == ("320", "213", "lazy")
    answer = (await browser.open(thumbnail["src"])).answer
    assert (answer.headers["content-type"], answer.content[:4]) == ("image/webp", b"RIFF")
    assert answer.headers["cache-control"].startswith("private")
    assert page.answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("variant", list(Variant))
async def test_the_curl_command_asks_for_the_same_again(
    service: TestService, member: Member, browser: Browser, variant: Variant
) -> None:
    prompt = {Variant.A: "prompt", Variant.B: "positive_prompt"}[variant]
    job = await _done(service, member, variant, **{prompt: 'a sailor\'s "boat" 🛶'})
    page = await browser.open(f"/console/history/{job.id}")
    words = shlex.split(page.text[page.text.index("curl http") : page.text.index(" This job")])
    assert "$ATELIER_KEY" in " ".join(words)
    assert f"# ATELIER_KEY: your key {member.key[:8]}…{member.key[-4:]} curl" in page.text
    again = await service.submit(member, variant, **json.loads(words[-1]))
    assert (await job_of(service.resources, again)).request == job.request


async def test_a_failed_job_says_why_in_words(service: TestService, member: Member, browser: Browser) -> None:
    lease = await service.lease(await service.submit(member))
    failure = Failure(code=FailureCode.OUT_OF_MEMORY, message="too large for this device")
    await service.resources.queue.fail(lease, failure, retry=False)
    text = (await browser.open(f"/console/history/{lease.job_id}")).text
    assert "Too large for this device. The device ran out of memory. Try a smaller size" in text


async def test_a_waiting_job_is_canceled_and_an_ended_one_deleted(
    service: TestService, member: Member, browser: Browser, resources: Resources
) -> None:
    job_id = await service.submit(member)
    page = await browser.press(f"/console/history/{job_id}", "Cancel this job")
    assert "Canceled" in page.text
    page = await browser.send(page.form("Delete this job"))
    assert page.answer.url.path == "/console/history"
    assert await resources.jobs.find(job_id) is None
    assert (await browser.open(f"/console/history/{job_id}")).status == 404
    acts = [(row.act, row.actor) for row in await resources.audit.rows(member.account.id)]
    assert {(Act.JOB_CANCELED, OWNER), (Act.JOB_DELETED, OWNER)} <= set(acts)


async def test_a_job_that_has_not_ended_is_not_deleted_and_no_form_works_without_its_token(
    service: TestService, member: Member, browser: Browser, resources: Resources
) -> None:
    ended = await _done(service, member, num_images=2)
    larger = {"image_id": ended.images[0].image_id}
    needs_it = (await service.client.post("/v1/upscale", json=larger, headers=member.a)).json()["request_id"]
    for button in ("Delete this job", "Delete this image"):
        page = await browser.press(f"/console/history/{ended.id}", button)
        assert (page.status, needs_it in page.text) == (409, True)
    job_id = await service.submit(member)
    form = (await browser.open(f"/console/history/{ended.id}")).form("Delete this job")
    form.action = form.action.replace(ended.id, job_id)
    refused = await browser.send(form)
    assert (refused.status, "cancel it first" in refused.text) == (409, True)
    for action in ("cancel", "delete"):
        form.action = f"/console/history/{job_id}/{action}"
        assert (await browser.send(form, form_token="0" * 64)).status == 403
    assert (await job_of(resources, job_id)).state is JobState.QUEUED


async def test_one_image_of_several_is_deleted_and_the_others_stay(
    service: TestService, member: Member, browser: Browser, resources: Resources
) -> None:
    job = await _done(service, member, num_images=3)
    address = f"/console/history/{job.id}"
    page = await browser.open(address)
    chosen = next(form for form in page.forms if form.action == f"{address}/{job.images[1].image_id}/delete")
    assert (await browser.send(chosen, form_token="0" * 64)).status == 403
    page = await browser.send(chosen)
    assert page.answer.url.path == address
    assert (await job_of(resources, job.id)).images == (job.images[0], job.images[2])
    assert [(await browser.open(f"{address}/{image.image_id}")).status for image in job.images] == [200, 404, 200]
    assert (await browser.send(chosen)).status == 404
    [_, second] = [form for form in page.forms if "Delete this image" in form.buttons]
    page = await browser.send(second)
    assert "Delete this image" not in page.text, "with the last one goes the job, as its own button says"
    rows = [row.subject for row in await resources.audit.rows(member.account.id) if row.act is Act.IMAGE_DELETED]
    assert rows == [job.images[1].image_id, job.images[2].image_id]


async def test_another_accounts_jobs_and_images_are_not_found(
    service: TestService, member: Member, browsers: Browsers, browser: Browser
) -> None:
    """Who is not signed in sees nothing either."""
    other = await service.member(plan_a="basic", plan_b="basic")
    job = await _done(service, other)
    mine = await browser.open("/console/history")
    assert job.id not in mine.answer.text
    image = job.images[0].image_id
    missing = job.id[:-2] + "aa"
    paths = [f"{{}}/{path}" for path in (image, f"{image}/thumbnail")]
    for path in ("{}", *paths):
        theirs, never = [await browser.open(f"/console/history/{path.format(each)}") for each in (job.id, missing)]
        assert (theirs.status, theirs.text) == (404, never.text)
        other = await browsers.new().open(f"/console/history/{path.format(job.id)}")
        assert other.answer.url.path == "/console/sign-in"
    own = await _done(service, member, num_images=2)
    page = await browser.open(f"/console/history/{own.id}")
    form = page.form("Delete this job")
    for action in ("delete", "cancel"):
        form.action = f"/console/history/{job.id}/{action}"
        assert (await browser.send(form)).status in (403, 404)
    form = page.form("Delete this image")
    form.action = f"/console/history/{job.id}/{image}/delete"
    assert (await browser.send(form)).status == 404
    assert (await browser.open(f"/console/history/{own.id}/{image}")).status == 404
    assert await service.resources.jobs.find(job.id) is not None


async def test_a_record_that_cannot_be_read_has_a_page_of_its_own_and_hides_no_other(
    service: TestService, member: Member, browser: Browser, redis_db: redis.Redis
) -> None:
    damaged, other = await service.submit(member), await service.submit(member, prompt="a readable boat")
    redis_db.hset(redis_key("job", damaged), "state", "of a newer version")
    page = await browser.open(f"/console/history/{damaged}")
    assert (page.status, "This record cannot be read" in page.text) == (500, True)
    assert "a readable boat" in (await browser.open("/console/history")).text
    assert "0 of 1 finished" in (await browser.open(f"/console/compare?jobs={damaged},{other}")).text
