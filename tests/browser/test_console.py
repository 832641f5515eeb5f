"""A person's first minutes with the console, with and without JavaScript."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from playwright.async_api import Browser, BrowserContext, Page, expect

from serve_app.domain.jobs import JobState
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.loras.applied_catalog import AppliedCatalog
from tests.browser.broken_lora import draw_small, has_state
from tests.browser.checks import findings
from tests.browser.site import ACCOUNT, PASSWORD, Site
from tests.support import POCKET, adapter_of, add_base_model, pocket_of_widths, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]

EXAMPLE = "a yellow flower with a red middle on a blue background"
DRAWN_MS = 90_000.0


async def width_of_picture(page: Page) -> int:
    """Return the natural width of the first finished picture, in pixels."""
    picture = page.get_by_role("img", name=re.compile("^Image 1, seed")).first
    await expect(picture).to_be_visible(timeout=DRAWN_MS)
    await page.wait_for_function("i => i.complete && i.naturalWidth > 0", arg=await picture.element_handle())
    return await picture.evaluate("i => i.naturalWidth")


async def test_an_example_is_drawn_with_previews_that_change(page: Page, site: Site) -> None:
    await page.goto(f"{site.base_url}/console/playground?prompt=")
    await page.get_by_role("link", name=EXAMPLE).click()
    seen: set[str] = set()
    page.on("request", lambda request: seen.add(request.url) if "/previews/" in request.url else None)
    await page.get_by_text("More settings").click()
    await page.get_by_label("Steps").fill("50")
    await page.get_by_label("Guidance until").fill("0.5")
    for width, height in ((1440, 900), (390, 844)):
        await page.set_viewport_size({"width": width, "height": height})
        await page.evaluate("scrollTo(0, 0)")
        for part in (
            page.get_by_label("Prompt", exact=True),
            page.locator(".pick-card").first,
            page.locator("button.go"),
        ):
            await expect(part).to_be_in_viewport(ratio=1)
    await expect(page.locator(".go-bar")).to_contain_text("One request; ")
    await expect(page.get_by_text("Guidance over 50 % of the steps: about 25 % less work")).to_be_visible()
    await page.get_by_label("Prompt", exact=True).press("Control+Enter")
    assert await width_of_picture(page) == 512
    assert len(seen) >= 2, "previews of two steps"
    await expect(page.get_by_role("heading", name="Done")).to_be_visible()
    drawn = page.url
    await page.get_by_role("link", name="Playground").click()
    await expect(page.get_by_label("Prompt", exact=True)).to_have_value(EXAMPLE)
    await expect(page.get_by_label("Steps")).to_have_value("50")
    await expect(page.locator(".latest a").first).to_have_attribute("href", drawn.removeprefix(site.base_url))
    assert not await findings(page)


async def test_a_word_that_the_model_has_never_read_is_named(page: Page) -> None:
    await page.get_by_label("Prompt", exact=True).fill("a yellow dragon")
    await expect(page.locator("#words")).to_contain_text("dragon")


async def test_no_more_loras_are_chosen_than_act_together_on_a_base_model_and_each_has_a_weight(
    page: Page, site: Site, tmp_path: Path
) -> None:
    other = adapter_of(site.account.id, name="Other", base_model="another")
    site.run(site.resources.adapter_registry.register(other))
    parts, catalog = site.resources, tmp_path / "catalog.yaml"
    catalog.write_text(parts.settings.catalog.read_text().replace("../models", str(POCKET.parent)))
    for name, widths in (("another", {}), ("narrow", {"cross_attention_dim": 96})):
        add_base_model(catalog, name, pocket_of_widths(tmp_path / name, **widths))
    more = AppliedCatalog(parts.process.redis, parts.settings.model_copy(update={"catalog": catalog}))
    site.run(more.apply_file())
    try:
        await page.goto(f"{site.base_url}/console/playground?prompt=")
        boxes = {name: page.get_by_role("checkbox", name=name, exact=True) for name in ("Neon", "Mosaic", "Other")}
        await expect(page.get_by_label("Weight of Neon")).to_be_hidden()
        await boxes["Neon"].check(force=True)
        await expect(boxes["Other"]).to_be_disabled()
        await expect(page.get_by_role("option", name="narrow", disabled=True)).to_have_count(1)
        await page.get_by_text("More settings").click()
        await page.get_by_label("Base model").select_option("another")
        await expect(boxes["Other"]).to_be_enabled()
        await page.get_by_label("Base model").select_option("")
        await expect(boxes["Other"]).to_be_disabled()
        await page.get_by_label("Weight of Neon").fill("5")
        await boxes["Neon"].uncheck(force=True)
        for name in ("Outline", "Sepia", "Shadow", "Stripes"):
            await expect(boxes["Mosaic"]).to_be_enabled()
            await page.get_by_role("checkbox", name=name, exact=True).check(force=True)
        await expect(boxes["Mosaic"]).to_be_disabled()
        await page.get_by_label("Prompt", exact=True).fill("a boat")
        await page.get_by_role("button", name="Generate").click()
        await page.wait_for_url("**/playground/job_*")  # the weight that nobody sees any more does not stop it
        [job] = site.run(site.resources.job_history.list(site.account.id, limit=1))
        assert isinstance(job.request, GenerationRequest)
        assert [lora.weight for lora in job.request.loras] == [0.75] * 4
    finally:
        site.run(parts.adapter_registry.remove(other.id))
        site.run(parts.applied_catalog.apply_file())


async def test_a_picture_and_a_mask_are_begun_from(page: Page, site: Site, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((320, 256)).save(file)
    await page.goto(f"{site.base_url}/console/playground?prompt={EXAMPLE}&steps=4&size=256x256")
    await page.locator("input[type=file]").set_input_files(file)
    await expect(page.locator("#usual-size")).to_have_text("576 × 456, as the picture")
    await expect(page.get_by_label("Size", exact=True)).to_have_value("256x256")
    await page.get_by_label("Strength").fill("0.5")
    await page.locator("input[type=file]").set_input_files(file)
    await expect(page.get_by_role("button", name="Remove the mask")).to_be_visible()
    await expect(page.locator("output[for=strength]")).to_have_text("0.5")
    assert not await findings(page)
    await page.get_by_role("button", name="Generate").click()
    assert await width_of_picture(page) == 256
    await expect(page.get_by_role("button", name="Remove the mask")).to_be_visible()
    await page.get_by_role("link", name="Begin from it").click()
    first = page.get_by_role("img", name="Picture to begin from")
    image_id = await page.locator(".tiles img").get_attribute("src") or ""
    await expect(first).to_have_attribute("src", f"/console/pictures/{image_id.rpartition('/')[2]}")
    await expect(page.locator("#usual-size")).to_have_text("512 × 512, as the picture")
    await page.get_by_role("button", name="Remove the picture to begin from").click()
    await expect(first).to_have_count(0)
    await expect(page.locator("#usual-size")).to_have_text("512 × 512, square")


@pytest.mark.parametrize(("tab", "button"), [("API", "Generate API key"), ("API Keys", "Create new API key")])
async def test_a_key_is_made_as_the_documents_say_and_shown_once(
    page: Page, context: BrowserContext, site: Site, tab: str, button: str
) -> None:
    """The buttons have the words of both documents, and the line that is shown draws when it is pasted into a shell."""
    await page.get_by_role("link", name="Keys", exact=True).click()
    settings = page.get_by_role("navigation", name="Account settings")
    await expect(settings.get_by_role("link", name="Account settings")).to_have_attribute("aria-current", "page")
    await settings.get_by_role("link", name=tab, exact=True).click()
    await page.get_by_role("button", name=button, exact=True).click()
    secret = await page.get_by_label("The new key").inner_text()
    pasted = ["bash", "-c", await page.locator("#curl").inner_text()]
    answer = json.loads((await asyncio.to_thread(subprocess.run, pasted, capture_output=True, check=True)).stdout)
    job_id = answer.get("request_id") or answer["run_id"]
    await wait_until(lambda: site.run(has_state(site.resources, job_id, JobState.COMPLETED)), timeout=90)
    for _ in range(2):
        await page.goto(page.url)
        assert secret not in await page.content()
        await expect(page.get_by_role("cell", name=re.compile(f"^{secret[:4]}"))).not_to_have_count(0)


async def test_the_reference_tries_an_operation(page: Page, site: Site) -> None:
    _, secret = site.run(site.resources.api_keys.create(site.account.id, interfaces=frozenset(Variant)))
    await page.goto(f"{site.base_url}/docs/a#generate")
    await page.get_by_label("API key").fill(secret)
    operation = page.locator("#generate")
    await operation.get_by_text("Try it").click()
    await operation.get_by_label("Example").select_option("Everything")
    await operation.get_by_role("button", name="Send").click()
    await expect(operation.get_by_role("status")).to_contain_text("202")
    job_id = json.loads(await operation.get_by_label("Body of the answer").inner_text())["request_id"]
    site.run(site.resources.queue.cancel(job_id, account_id=site.account.id))
    await page.goto(f"{site.base_url}/docs/jobs#getJob")
    await page.get_by_label("API key").fill(secret)
    await page.get_by_label("Sent as").select_option("X-API-Key")
    operation = page.locator("#getJob")
    await operation.get_by_text("Try it").click()
    await operation.get_by_label("job_id").fill(job_id)
    await operation.get_by_role("button", name="Send").click()
    await expect(operation.get_by_role("status")).to_contain_text("200")


async def test_the_history_is_filtered_and_a_job_is_opened_in_the_playground(page: Page, site: Site) -> None:
    prompt, other = "a green boat on a quiet lake", "a red boat on a wild sea"
    for text, lora in ((prompt, "neon"), (other, "outline")):
        site.run(draw_small(site.resources, site.account, text, lora))
    await page.goto(f"{site.base_url}/console/history")
    await page.get_by_label("LoRA").fill("Neon")
    await page.get_by_label("State").select_option("Done")
    await page.get_by_label("Key").select_option("Console")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_text(other)).to_have_count(0)
    await page.get_by_role("link", name=prompt).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(prompt)
    await page.get_by_role("link", name="Open in the playground").click()
    await expect(page.get_by_label("Prompt", exact=True)).to_have_value(prompt)
    await page.goto(f"{site.base_url}/console/history?to=2001-01-01")
    await expect(page.get_by_text("No jobs match.")).to_be_visible()


async def test_without_javascript_a_job_is_drawn_and_found_in_the_history(chromium: Browser, site: Site) -> None:
    context = await chromium.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(f"{site.base_url}/console/playground?prompt=")
    await page.get_by_label("Account or user").fill(ACCOUNT)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_label("Prompt", exact=True).fill(EXAMPLE)
    await page.get_by_text("More settings").click()
    await page.get_by_label("Steps").fill("4")
    await page.get_by_role("button", name="Generate").click()
    picture = page.get_by_role("img", name=re.compile("^Image 1, seed"))
    async with asyncio.timeout(DRAWN_MS / 1000):
        while not await picture.is_visible():
            assert not await page.locator("meta[http-equiv=refresh]").count()
            await page.get_by_role("link", name="Look again").click()
    await page.get_by_role("link", name="History").click()
    await expect(page.get_by_text(EXAMPLE).first).to_be_visible()
    await context.close()
