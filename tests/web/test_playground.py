"""The playground makes an ordinary job and shows it until it ends, also without scripts."""

from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image

from serve_app.domain.accounts import Account
from serve_app.domain.catalog import BaseModel
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import (
    GenerationDraft,
    GenerationRequest,
    ImageFormat,
    LoraUse,
    Picture,
    UpscaleRequest,
    Variant,
)
from serve_app.jobs.previews import Preview
from serve_app.loras.vocabulary import known_words, unknown_words
from serve_app.web.console.playground import FORM_LIFE
from serve_app.web.console.playground_form import DEFAULTS, chosen_loras, read_draft, values_of
from tests.api.app import LORA, TestService
from tests.api.test_images import due
from tests.composition import Resources
from tests.support import POCKET, adapter_id, adapter_of, add_base_model, change_base_model, png_of, pocket_of_widths
from tests.web.browser import Browser, Page
from tests.web.conftest import PASSWORD, Browsers

NEON = adapter_id("neon")
_FILE = BytesIO()
Image.new("RGB", (320, 256), "red").save(_FILE, "PNG")
PNG = _FILE.getvalue()
FIELDS = {
    "prompt": " a (red:1.2) boat ", "negative_prompt": "a tree", f"lora:{LORA}": "yes", f"weight:{LORA}": "0.5",
    f"lora:{NEON}": "yes", f"weight:{NEON}": "-0.25", "size": "768x512", "steps": "21", "guidance_scale": "3.5",
    "guidance_start": "0", "guidance_end": "0.5",
    "sampler": "dpm++2m", "spacing": "karras", "num_images": "2", "seed": "41", "output_format": "webp",
    "prompt_weights": "yes", "embed_settings": "yes",
}  # fmt: skip
REQUEST = GenerationRequest(
    prompt="a (red:1.2) boat", negative_prompt="a tree", loras=(LoraUse(LORA, 0.5), LoraUse(NEON, -0.25)), width=768,
    height=512, steps=21, guidance_scale=3.5, guidance_start=0, guidance_end=0.5, sampler="dpm++2m-karras",
    seeds=(41, 42), prompt_weights=True, embed_settings=True, output_format=ImageFormat.WEBP, base_model="pocket",
)  # fmt: skip


async def _generate(browser: Browser, **fields: str) -> Page:
    return await browser.press("/console/playground", "Generate", **{**FIELDS, **fields})


async def _send_picture(browser: Browser, content: bytes, *, scripted: bool = False, **fields: str) -> httpx.Response:
    page = await browser.open("/console/playground")
    token = page.form("Upload").fields["form_token"]
    headers = {"Sec-Fetch-Site": "same-origin", **({"HX-Request": "true"} if scripted else {})}
    data, files = {"form_token": token, **fields}, {"file": ("x.png", content)}
    return await browser.http.post("/console/pictures", data=data, files=files, headers=headers)


async def _only_job(resources: Resources, account: Account) -> Job:
    [job] = await resources.job_history.list(account.id)
    return job


@pytest.mark.slow
async def test_the_form_makes_a_job_with_its_fields_counted_in_the_plan(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    before = (await resources.auth.window(owner.id, Variant.A)).remaining
    page = await _generate(browser)
    job = await _only_job(resources, owner)
    assert page.answer.url.path == f"/console/playground/{job.id}"
    assert (job.request, job.variant, job.key_id) == (REQUEST, Variant.A, "")
    assert job.id.startswith("job_")
    assert (await resources.auth.window(owner.id, Variant.A)).remaining == before - 1
    assert "Waiting next in your queue" in page.text
    assert "Look again" in page.text, "goes on without scripts"


def test_a_request_fills_in_the_form_that_makes_it() -> None:
    picture = Picture("img_x", "file:///x.png")
    for request in (
        REQUEST,
        replace(REQUEST, loras=(), sampler="", prompt_weights=False, image=picture, strength=0.35, mask=picture),
    ):
        fields = values_of(request)
        assert read_draft(fields, chosen_loras(fields)) == GenerationDraft.like(request)
    drawn = [read_draft({**FIELDS, "seed": ""}, {}).seed for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_what_is_left_empty_is_left_to_the_base_model() -> None:
    draft = read_draft({**DEFAULTS, "prompt": "a boat", "seed": "7"}, {})
    assert draft == GenerationDraft(prompt="a boat", seed=7)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("prompt", " ", "prompt"), ("size", "64x64", "width"), ("size", "large", "size"), ("steps", "151", "steps"),
        ("steps", "2.5", "steps"), ("guidance_scale", "nan", "guidance scale"), ("num_images", "9", "num images"),
        ("seed", "x", "seed"), ("seed", "-1", "seed"), ("seed", str(2**64), "seed"),
        ("sampler", "", "noise schedule"), ("guidance_end", "nan", "guidance end"),
    ],
)  # fmt: skip
def test_a_field_that_breaks_its_rule_is_named(field: str, value: str, name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name}: (must be|choose|is required)"):
        read_draft({**FIELDS, field: value}, {})


@pytest.mark.parametrize("loras", [{LORA: "2.1"}, {LORA: "much"}, dict.fromkeys("abcde", "1")])
def test_loras_beyond_what_acts_together_are_refused(loras: dict[str, str]) -> None:
    with pytest.raises(InvalidParameter, match=r"^(loras|LoRA 1, weight): "):
        read_draft(FIELDS, loras)


@pytest.mark.slow
async def test_what_is_refused_leaves_the_form_as_it_was(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    wrong = await _generate(browser, steps="0")
    unknown = await _generate(browser, **{"lora:model_of_nobody": "yes"})
    for page, status, words in ((wrong, 400, "Steps: must be"), (unknown, 403, "must be a LoRA that you may use")):
        assert page.status == status
        assert words in page.text
        assert "a (red:1.2) boat" in page.text
        assert {LORA, NEON} == {a["name"][5:] for _, a in page.tags if "checked" in a and "lora:" in a["name"]}
    assert await resources.job_history.list(owner.id) == []


@pytest.mark.slow
async def test_over_the_plan_nothing_is_accepted(browser: Browser, resources: Resources, owner: Account) -> None:
    window = await resources.auth.window(owner.id, Variant.A)
    for _ in range(window.remaining):
        await resources.auth.count_owner(owner.id, Variant.A)
    page = await _generate(browser)
    assert page.status == 429
    assert "try again in" in page.text
    assert await resources.job_history.list(owner.id) == []


@pytest.mark.slow
async def test_a_running_job_shows_its_previews_to_its_owner_alone(
    browser: Browser, browsers: Browsers, service: TestService, owner: Account
) -> None:
    resources = service.resources
    await _generate(browser)
    job = await _only_job(resources, owner)
    await service.run(job.id, progress=50)
    await resources.previews.put(job.id, {1: Preview(10, b"\x89PNG of the second")})
    panel = await browser.open(f"/console/playground/{job.id}/panel")
    assert await resources.previews.is_watched(job.id)
    assert "step 10 of 21" in panel.text
    [address] = [a["src"] for tag, a in panel.tags if tag == "img"]
    assert (await browser.http.get(address)).content == b"\x89PNG of the second"
    assert (await browser.http.get(address.replace("previews/1", "previews/0"))).status_code == 404
    await resources.accounts.create("other", password=PASSWORD)
    other = await browsers.signed_in("other")
    for path in (address, f"/console/playground/{job.id}", f"/console/playground/{job.id}/panel"):
        assert (await other.http.get(path)).status_code == 404
        assert (await browsers.new().open(path)).answer.url.path == "/console/sign-in"


@pytest.mark.slow
async def test_a_finished_job_offers_what_can_be_done_with_it(
    browser: Browser, service: TestService, owner: Account
) -> None:
    await _generate(browser)
    job = await service.complete((await _only_job(service.resources, owner)).id)
    page = await browser.open(f"/console/playground/{job.id}")
    assert "http-equiv" not in page.answer.text
    assert "hx-get" not in page.answer.text
    assert {"Seed 41", "Seed 42"} <= {f"Seed {seed}" for seed in ("41", "42") if f"Seed {seed}" in page.text}
    for words in (
        "/v1/jobs",
        "Authorization: Bearer $ATELIER_KEY",
        "requests.post",
        "await fetch",
        "an API key of yours",
    ):
        assert words in page.text
    image = job.images[0]
    assert (await browser.http.get(f"/console/history/{job.id}/{image.image_id}")).status_code == 200

    await browser.send(page.form("Again with the next seed"), seed="next")
    await browser.send(page.form("Upscale 2×"), factor="2")
    upscaled, varied = (await service.resources.job_history.list(owner.id))[:2]
    assert isinstance(upscaled.request, UpscaleRequest)
    assert isinstance(varied.request, GenerationRequest)
    assert (upscaled.request.image_id, varied.request.seeds) == (image.image_id, (43, 44))

    waiting = await browser.open(f"/console/playground/{varied.id}")
    canceled = await browser.send(waiting.form("Cancel"))
    assert "Canceled" in canceled.text
    refused = await browser.send(page.form("Delete for good"))
    assert (refused.answer.status_code, f"Job {upscaled.id} needs this image" in refused.text) == (409, True)
    await service.resources.queue.cancel(upscaled.id, account_id=owner.id)
    gone = await browser.send(page.form("Delete for good"))
    assert gone.answer.url.path == "/console/playground"
    assert await service.resources.jobs.find(job.id) is None


@pytest.mark.slow
async def test_the_code_names_the_key_that_was_chosen_and_never_its_secret(
    browser: Browser, service: TestService, owner: Account
) -> None:
    keys = service.resources.api_keys
    made = {
        name: await keys.create(owner.id, name=name, interfaces=frozenset(Variant))
        for name in ("laptop\nrm -rf /", "server")
    }
    await keys.create(owner.id, name="bearer only", interfaces=frozenset({Variant.A}))
    simple = {name: FIELDS[name] for name in ("prompt", "negative_prompt", f"lora:{LORA}")}
    await browser.press("/console/playground", "Generate", **simple)
    job = await service.complete((await _only_job(service.resources, owner)).id)
    key, secret = made["laptop\nrm -rf /"]
    page = await browser.open(f"/console/playground/{job.id}?key={key.id}")
    assert page.answer.text.count(f"ATELIER_KEY: your key &#34;laptop rm -rf /&#34;, {key.hint}\n") == 3
    assert secret not in page.answer.text
    assert "bearer only" not in page.text, "this request goes over the other interface"
    assert "X-API-Key: $ATELIER_KEY" in page.text
    assert 'os.environ["ATELIER_KEY"]' in page.text
    assert "`${process.env.ATELIER_KEY}`" in page.text


@pytest.mark.slow
@pytest.mark.parametrize("button", ["Generate", "Cancel"])
async def test_a_form_of_another_page_is_refused(
    browser: Browser, resources: Resources, owner: Account, button: str
) -> None:
    page = await _generate(browser)
    stolen = page.form("Sign out").fields["form_token"]
    assert (await browser.send(page.form(button), **{**FIELDS, "form_token": stolen})).status == 403
    assert (await _only_job(resources, owner)).state is JobState.QUEUED


@pytest.mark.parametrize("wanted", ["/console/playground", "/console/verify"])
async def test_signing_in_leads_on_to_what_was_wanted(browsers: Browsers, owner: Account, wanted: str) -> None:
    page = await browsers.new().press(wanted, "Sign in", name="owner", password=PASSWORD)
    assert page.answer.url.path == wanted


async def test_words_that_the_bundled_model_has_never_read_are_named(browser: Browser) -> None:
    known = await known_words([BaseModel(id="pocket", source=str(POCKET)), BaseModel(id="x", source="/nowhere")])
    assert list(known) == ["pocket"]
    assert unknown_words("A red dragon, a Dragon and a moon", known["pocket"]) == ["dragon"]
    page = await browser.open("/console/playground?prompt=a+red+dragon")
    assert "The model does not know: dragon. It knows" in page.text
    assert " moon " in next(
        a["data-words"] for _, a in page.tags if a.get("data-base") == "pocket" and "data-words" in a
    ), "for the script"
    assert "does not know" not in (await browser.open("/console/playground?prompt=a+red+moon")).text


@pytest.mark.slow
async def test_what_is_left_to_the_lora_stays_automatic_when_its_job_is_shown(
    browser: Browser, service: TestService, owner: Account
) -> None:
    resources = service.resources
    change_base_model(resources.settings.catalog, guidance=1.5, guidance_end=0.5)
    await resources.applied_catalog.apply_file()
    quick = adapter_of(owner.id, steps=8)
    await resources.adapter_registry.register(quick)

    async def drawn(**fields: str) -> tuple[int, float, dict[str, str]]:
        await browser.press(f"/console/playground?lora_id={quick.id}", "Generate", prompt="a boat", **fields)
        job = await service.complete((await resources.job_history.list(owner.id))[0].id)
        assert isinstance(job.request, GenerationRequest)
        page = await browser.open(f"/console/playground/{job.id}")
        assert f"&#34;steps&#34;: {job.request.steps}" in page.answer.text, "the code asks for the same"
        return job.request.steps, job.request.guidance_scale, page.form("Generate").fields

    steps, guidance, shown = await drawn()
    assert (steps, guidance, shown["steps"], shown["guidance_scale"], shown["guidance_end"]) == (8, 1.5, "", "", "")
    job_id = (await resources.job_history.list(owner.id))[0].id
    assert "1.5 over 4 of 8 steps: about 25 % less work" in (await browser.open(f"/console/history/{job_id}")).text
    assert shown[f"lora:{quick.id}"] == "yes"
    steps, guidance, shown = await drawn(steps="25")
    assert (steps, guidance, shown["steps"], shown["guidance_scale"]) == (25, 1.5, "25", "")


@pytest.mark.slow
async def test_a_lora_is_drawn_on_the_chosen_base_model_where_that_is_of_its_widths(
    browser: Browser, service: TestService, owner: Account, tmp_path: Path
) -> None:
    resources = service.resources
    catalog, names = resources.settings.catalog, ("pocket", "turbo", "narrow")
    add_base_model(catalog, "turbo")
    add_base_model(catalog, "narrow", pocket_of_widths(tmp_path / "narrow", cross_attention_dim=96))
    await resources.applied_catalog.apply_file()
    card = next(a for _, a in (await browser.open("/console/playground")).tags if a.get("name") == f"lora:{LORA}")
    assert card["data-bases"] == "pocket turbo"
    assert "Also drawn on turbo" in (await browser.open(f"/console/loras/{LORA}")).text
    address, asked = f"/console/playground?lora_id={LORA}", "&#34;base_model&#34;: &#34;turbo&#34;"
    for base_model, shown in (("turbo", "turbo"), ("pocket", ""), ("", "")):
        await browser.press(address, "Generate", prompt="a boat", base_model=base_model)
        newest = await service.complete((await resources.job_history.list(owner.id))[0].id)
        assert isinstance(newest.request, GenerationRequest)
        page = await browser.open(f"/console/playground/{newest.id}")
        assert (newest.request.loras[0].id, newest.request.base_model) == (LORA, base_model or "pocket")
        named = [a["value"] for tag, a in page.tags if tag == "option" and "selected" in a and a["value"] in names]
        assert named == [shown] * bool(shown)
        for code in (page.answer.text, (await browser.open(f"/console/history/{newest.id}")).answer.text):
            assert (asked in code, "/v1/jobs" in code) == (bool(shown), bool(shown)), "no other interface names one"
    page = await browser.press(address, "Generate", prompt="a boat", base_model="narrow")
    assert "LoRA 1: a LoRA of pocket cannot be drawn on narrow: unet.cross_attention_dim is 128" in page.text
    compared = {f"lora:{name}": "yes" for name in (LORA, NEON)}
    await browser.press("/console/compare", "Compare", prompt="a boat", base_model="turbo", **compared)
    requests = [job.request for job in await resources.job_history.list(owner.id, limit=2)]
    assert {each.base_model for each in requests if isinstance(each, GenerationRequest)} == {"turbo"}


@pytest.mark.slow
async def test_a_picture_and_a_mask_are_kept_begun_from_and_taken_away(
    browser: Browser, browsers: Browsers, resources: Resources, owner: Account
) -> None:
    unused = Page(await _send_picture(browser, png_of((8, 8)))).form("Generate").fields["image_id"]
    page = Page(await _send_picture(browser, PNG))
    assert page.answer.url.path == "/console/playground"
    image_id = page.form("Generate").fields["image_id"]
    await due(resources, FORM_LIFE - timedelta(minutes=1))
    assert (await browser.http.get(f"/console/pictures/{unused}")).status_code == 200, "its form may still be open"
    part = Page(await _send_picture(browser, PNG, scripted=True, image_id=image_id))
    kept = {a["name"]: a["value"] for tag, a in part.tags if tag == "input" and a["name"] != "file"}
    assert (kept["image_id"], part.tagged("picture")) == (image_id, True)
    await browser.press("/console/playground", "Generate", **{**kept, "prompt": "a boat", "strength": "0.4"})
    request = (await _only_job(resources, owner)).request
    assert isinstance(request, GenerationRequest)
    assert request.image
    assert request.mask
    assert (request.image.image_id, request.mask.image_id) == (image_id, kept["mask_image_id"])
    assert request.strength == 0.4
    await due(resources, FORM_LIFE + timedelta(minutes=1))
    assert (await browser.http.get(f"/console/pictures/{unused}")).status_code == 404
    small = f"/console/pictures/{image_id}"
    assert (await browser.http.get(small)).headers["content-type"] == "image/webp"
    await resources.accounts.create("other", password=PASSWORD)
    assert (await (await browsers.signed_in("other")).http.get(small)).status_code == 404
    both = {"image_id": image_id, "mask_image_id": kept["mask_image_id"]}
    for removed, left in (("mask_image_id", {image_id}), ("image_id", set[str]())):
        part = Page(await _send_picture(browser, b"", scripted=True, remove=removed, **both))
        assert {a["value"] for tag, a in part.tags if tag == "input" and a["name"] in both} == left


@pytest.mark.slow
async def test_what_is_no_picture_is_refused_beside_the_form(browser: Browser, resources: Resources) -> None:
    for content, status, words in ((b"MZ" * 300, 415, "must be a PNG"), (b"", 400, "Choose a PNG")):
        answer = await _send_picture(browser, content, scripted=True)
        assert (answer.status_code, answer.headers["hx-retarget"]) == (status, "#picture-problem")
        assert words in answer.text
        assert "<form" not in answer.text
        page = Page(await _send_picture(browser, content))
        assert (page.status, words in page.text) == (status, True)
        assert page.form("Generate")
    page = await browser.open("/console/playground")
    stolen = page.form("Sign out").fields["form_token"]
    assert (await _send_picture(browser, PNG, form_token=stolen)).status_code == 403
