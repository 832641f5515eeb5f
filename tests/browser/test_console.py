"""A person's first minutes with the console, with and without JavaScript."""

import re

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.site import ACCOUNT, PASSWORD, Site

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]

EXAMPLE = "a yellow flower with a red middle on a blue background"
DRAWN_MS = 90_000.0


async def width_of_picture(page: Page) -> int:
    """Natural width of the first finished picture, in pixels."""
    picture = page.get_by_role("img", name=re.compile("^Image 1, seed")).first
    await expect(picture).to_be_visible(timeout=DRAWN_MS)
    await page.wait_for_function("i => i.complete && i.naturalWidth > 0", arg=await picture.element_handle())
    return await picture.evaluate("i => i.naturalWidth")


async def test_an_example_is_drawn_with_previews_that_change(page: Page) -> None:
    await page.get_by_role("link", name=EXAMPLE).click()
    seen: set[str] = set()
    page.on("request", lambda request: seen.add(request.url) if "/previews/" in request.url else None)
    await page.get_by_text("More settings").click()
    await page.get_by_label("Steps").fill("50")
    await page.get_by_role("button", name="Generate").click()
    assert await width_of_picture(page) == 512
    assert len(seen) >= 2, "previews of two steps"
    await expect(page.get_by_role("heading", name="Done")).to_be_visible()


async def test_a_word_that_the_model_has_never_read_is_named(page: Page) -> None:
    await page.get_by_label("Prompt", exact=True).fill("a yellow dragon")
    await expect(page.locator("#words")).to_contain_text("dragon")


async def test_a_key_is_shown_once_and_draws(page: Page, site: Site) -> None:
    await page.goto(f"{site.base_url}/console/settings/api")
    await page.get_by_role("button", name=re.compile("Create|Generate")).first.click()
    secret = (await page.get_by_text(re.compile(r"^atl_\w+$")).first.inner_text()).strip()
    answer = await page.request.get(f"{site.base_url}/v1/loras", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status == 200
    await page.goto(f"{site.base_url}/console/settings/api")
    assert secret not in await page.content()


async def test_without_javascript_a_job_is_drawn_and_found_in_the_history(chromium: Browser, site: Site) -> None:
    context = await chromium.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(f"{site.base_url}/console/playground")
    await page.get_by_label("Account or user").fill(ACCOUNT)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_label("Prompt", exact=True).fill(EXAMPLE)
    await page.get_by_role("button", name="Generate").click()
    picture = page.get_by_role("img", name=re.compile("^Image 1, seed"))
    await expect(picture).to_be_visible(timeout=DRAWN_MS)
    await page.get_by_role("link", name="History").click()
    await expect(page.get_by_text(EXAMPLE).first).to_be_visible()
    await context.close()
