"""People use the console beside drawing: they compare, enlarge, add and share LoRAs.

They do so without a mouse, in two tabs, and when something ends midway.
"""

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page, Route, expect

from tests.browser.broken_lora import draw_small
from tests.browser.checks import findings, layout_shift, watch_layout
from tests.browser.site import PASSWORD, Site, sign_in
from tests.support import POCKET

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]

PROMPT = "purple mountains under a black sky with a yellow moon"
DRAWN_MS = 90_000.0
_TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>'\"&"


async def job_of(page: Page, site: Site, *, steps: int = 20) -> str:
    """Ask for an image in the playground; return the path of the job's page."""
    await page.goto(f"{site.base_url}/console/playground?prompt={PROMPT}&steps={steps}&seed=1")
    await page.get_by_role("button", name="Generate").click()
    await page.wait_for_url("**/playground/job_*")
    return page.url


async def wait_until_done(page: Page) -> None:
    await expect(page.get_by_role("heading", name="Done")).to_be_visible(timeout=DRAWN_MS)


async def test_eight_loras_are_compared_side_by_side(page: Page, site: Site) -> None:
    await page.goto(f"{site.base_url}/console/compare?prompt={PROMPT}&seed=3&steps=1")
    for box in await page.get_by_role("checkbox").all():
        await box.check(force=True)
    await page.get_by_role("button", name="Compare").click()
    await expect(
        page.get_by_role("heading", name="Drawing").or_(page.get_by_role("heading", name="Done"))
    ).to_be_visible()
    assert not await findings(page)
    await wait_until_done(page)
    await expect(page.get_by_role("img", name=re.compile("^Drawn with "))).to_have_count(8)
    assert not await findings(page)


async def test_an_image_is_enlarged(page: Page, site: Site) -> None:
    drawn = await job_of(page, site, steps=4)
    await wait_until_done(page)
    await page.get_by_role("button", name="Upscale 2×").click()
    await page.wait_for_url("**/playground/up_*")
    await wait_until_done(page)
    picture = page.get_by_role("img", name="Image 1").first
    await page.wait_for_function("i => i.complete && i.naturalWidth > 0", arg=await picture.element_handle())
    assert await picture.evaluate("i => i.naturalWidth") == 1024
    await expect(page.get_by_label("Prompt", exact=True)).to_have_value(PROMPT)
    await expect(page.get_by_role("link", name="Back to the enlarged picture")).to_have_attribute(
        "href", drawn.removeprefix(site.base_url)
    )
    assert not await findings(page)


async def test_a_lora_is_refused_added_and_used_by_whom_it_is_shared_with(
    unwatched: Page, site: Site, tmp_path: Path
) -> None:
    page = unwatched
    partner = site.run(site.resources.accounts.create("partner"))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"not a LoRA")
    for file, verdict in ((bad, "was refused"), (POCKET / "loras" / "neon.safetensors", "You can use the LoRA now")):
        await page.goto(f"{site.base_url}/console/loras/new")
        await page.locator("input[type=file]").first.set_input_files(file)
        await page.get_by_label(re.compile("^Name")).fill(HOSTILE[:90])
        await page.get_by_role("button", name=re.compile("^(Add|Upload)")).click()
        await expect(page.get_by_text(verdict)).to_be_visible(timeout=DRAWN_MS)
        assert not await findings(page)
    await page.get_by_label(re.compile("^Another account")).fill("partner")
    await page.get_by_role("button", name="Share").click()
    await expect(page.get_by_text("The LoRA is shared.")).to_be_visible()
    assert not await findings(page)
    lora = page.url.rpartition("/")[2].partition("?")[0]
    await page.context.clear_cookies()
    await sign_in(page, site.sign_in_url(partner))
    await page.goto(f"{site.base_url}/console/loras/{lora}")
    await expect(page.get_by_text("Shared by ")).to_be_visible()
    await page.get_by_role("link", name="Open in the playground").click()
    await expect(page.locator(f"input[name='lora:{lora}']")).to_be_checked()
    for path in ("loras", "playground", "history", "usage", "compare"):
        await page.goto(f"{site.base_url}/console/{path}")
        assert "pwned" not in await page.title(), path
    site.run(_remove_own_loras(site))


async def _remove_own_loras(site: Site) -> None:
    for lora_id in await site.resources.catalog.owned_ids(site.account.id):
        await site.resources.adapter_registry.remove(lora_id)


async def test_markup_in_prompts_and_names_of_keys_is_text(page: Page, site: Site) -> None:
    await page.goto(f"{site.base_url}/console/settings/api")
    await page.get_by_label(re.compile("^Name")).fill(HOSTILE[:60])
    await page.get_by_role("button", name="Generate API key").click()
    await expect(page.get_by_text("Your new key")).to_be_visible()
    await expect(page.get_by_role("cell", name=HOSTILE[:60])).to_be_visible()
    await page.goto(f"{site.base_url}/console/playground?prompt=")
    await page.get_by_label("Prompt", exact=True).fill(HOSTILE)
    await page.get_by_role("button", name="Generate").click()
    await page.wait_for_url("**/playground/job_*")
    job = page.url.rpartition("/")[2]
    for path in (
        f"playground/{job}",
        f"history/{job}",
        "history",
        "usage",
        "settings/api",
        f"playground?prompt={HOSTILE}",
    ):
        await page.goto(f"{site.base_url}/console/{path}")
        assert "pwned" not in await page.title(), path
    await page.goto(f"{site.base_url}/console/history/{job}")
    await expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)


async def test_the_keyboard_alone_draws(page: Page, site: Site) -> None:
    await page.goto(f"{site.base_url}/console/playground?steps=4")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to content"
    await page.keyboard.press("Enter")
    await _tab_to(page, "textarea[name=prompt]")
    await page.keyboard.type(PROMPT)
    await _tab_to(page, "button.main")
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "where one is can be seen"
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/playground/job_*")
    await wait_until_done(page)
    await _tab_to(page, "a[download]")
    async with page.expect_download() as download:
        await page.keyboard.press("Enter")
    file = await (await download.value).path()
    assert file.read_bytes().startswith(b"\x89PNG")


async def _tab_to(page: Page, selector: str) -> None:
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await page.locator(selector).evaluate_all("all => all.includes(document.activeElement)"):
            return
    raise AssertionError(f"the keyboard does not reach {selector}")


@pytest.mark.parametrize("sized", [True, False], ids=["as it is", "control: pictures without a size"])
async def test_no_page_jumps_while_its_pictures_load(unwatched: Page, site: Site, sized: bool) -> None:
    page, job = unwatched, site.run(draw_small(site.resources, site.account, PROMPT, "neon"))
    may_load = asyncio.Event()

    async def delay(route: Route) -> None:
        await may_load.wait()
        await route.continue_()

    async def strip(route: Route) -> None:
        answer = await route.fetch()
        html = re.sub(r'(<img [^>]*) width="\d+" height="\d+"', r"\1", await answer.text())
        await route.fulfill(response=answer, body=html)

    await watch_layout(page)
    await page.route(re.compile("/img_|/thumbnail|/samples/"), delay)
    if not sized:
        await page.route("**/console/history/gen_*", strip)
    shifts: dict[str, float] = {}
    paths = (
        "",
        "console/playground",
        "console/compare",
        "console/history",
        "console/loras",
        f"console/playground/{job}",
    )
    for path in (*(paths if sized else ()), f"console/history/{job}"):
        may_load.clear()
        await page.goto(f"{site.base_url}/{path}", wait_until="domcontentloaded")
        await page.evaluate(_TWO_FRAMES)
        may_load.set()
        await page.wait_for_load_state("load")
        await page.evaluate(_TWO_FRAMES)
        shifts[path] = await layout_shift(page)
    assert (set(shifts.values()) == {0.0}) is sized, shifts


async def test_two_tabs_show_the_same_job_whose_end_is_said_and_focus_stays(
    page: Page, context: BrowserContext, site: Site
) -> None:
    address = await job_of(page, site, steps=50)
    in_history, other = await context.new_page(), await context.new_page()  # the last one is in front
    await other.goto(address)
    await in_history.goto(address.replace("playground", "history"))
    await in_history.get_by_role("button", name="Cancel this job").focus()
    cancel = page.get_by_role("button", name="Cancel")
    await cancel.focus()
    await page.evaluate("document.getElementById('panel').classList.add('before')")
    await expect(page.locator("#panel:not(.before)")).to_be_visible()
    await expect(cancel).to_be_focused()
    await other.get_by_role("button", name="Cancel").click()
    for tab in (other, page):
        await expect(tab.get_by_role("heading", name="Canceled")).to_be_visible()
        await expect(tab.locator("#said")).to_have_text("Canceled")
        await expect(tab).to_have_title("Canceled · Playground · Atelier")
    await expect(page.get_by_role("heading", name="Canceled")).to_be_focused()
    await expect(in_history).to_have_title("Canceled · Job · Atelier")
    await expect(in_history.get_by_role("heading", name=PROMPT)).to_be_focused()
    await expect(in_history.locator("#said")).to_have_text("Canceled")
    assert not await findings(page)
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.get_by_role("link", name="Change the prompt").click()
    await expect(page.get_by_label("Prompt", exact=True)).to_be_in_viewport()


async def test_a_page_whose_session_ends_midway_leads_to_the_sign_in_and_back(unwatched: Page, site: Site) -> None:
    address = await job_of(unwatched, site, steps=50)
    site.run(site.resources.sessions.revoke_all(site.account.id))
    await unwatched.wait_for_url("**/console/sign-in*")
    await unwatched.get_by_label("Account or user").fill("demo")
    await unwatched.get_by_label("Password").fill(PASSWORD)
    await unwatched.get_by_role("button", name="Sign in").click()
    await unwatched.wait_for_url(address)


async def test_a_page_goes_on_when_the_ingress_was_restarted(unwatched: Page, site: Site) -> None:
    await job_of(unwatched, site, steps=30)
    with site.ingress_down():
        await unwatched.wait_for_event("requestfailed")
    await wait_until_done(unwatched)
