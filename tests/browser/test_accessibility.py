"""axe-core over every page and state of a page: no violation."""

from typing import Any, cast

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page

from tests.browser.site import Site
from tests.browser.test_flows import PROMPT, job_of, wait_until_done

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(240)]

PUBLIC = ("/", "/docs", "/docs/a", "/nothing-here", "/console/sign-in", "/console/links/nothing")
CONSOLE = (
    "playground", "playground?prompt=a+dragon", "compare", "history", "history?state=failed", "loras", "loras/new",
    "usage", "settings", "settings/api", "settings/api-keys", "settings/password", "settings/users", "nothing-here",
)  # fmt: skip
OF_SWAGGER_UI = frozenset(
    {
        "color-contrast",  # the version's number
        "heading-order",  # groups of operations are h3 below its h1
        "landmark-main-is-top-level",  # it has a main of its own in ours
        "landmark-no-duplicate-main",
        "landmark-unique",
        "nested-interactive",  # links within the button that opens an operation
        "select-name",  # the choice of a server
    }
)
"""Findings in the vendored Swagger UI, which is not ours to change."""
_axe = cast(Any, Axe())


async def findings(page: Page, known: frozenset[str] = frozenset()) -> list[str]:
    """What axe-core finds on the page as it is now: the address, the rule, and the first element of each."""
    result = await _axe.run(page)
    return [
        f"{page.url}: {found['id']}: {found['nodes'][0]['html'][:160]}"
        for found in result.response["violations"]
        if found["id"] not in known
    ]


async def test_the_public_pages_have_no_violation(chromium: Browser, site: Site) -> None:
    context = await chromium.new_context()
    page, found = await context.new_page(), list[str]()
    for path in PUBLIC:
        await page.goto(site.base_url + path, wait_until="load")
        found += await findings(page, OF_SWAGGER_UI if path == "/docs/a" else frozenset())
    await page.goto(site.sign_in_url())
    found += await findings(page)
    await context.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
async def test_the_console_has_no_violation(chromium: Browser, site: Site, scheme: Any) -> None:
    """Also while a job is drawn, when it is done, with a new key and a new invitation."""
    context = await chromium.new_context(color_scheme=scheme)
    page, found = await context.new_page(), list[str]()
    await page.goto(site.sign_in_url())
    await page.get_by_role("button", name="Sign in").click()
    drawn = await job_of(page, site)
    found += await findings(page)
    for path in CONSOLE:
        await page.goto(f"{site.base_url}/console/{path}")
        found += await findings(page)
    await page.goto(f"{site.base_url}/console/settings/api")
    await page.get_by_role("button", name="Generate API key").click()
    found += await findings(page)
    await page.goto(f"{site.base_url}/console/settings/users")
    await page.get_by_label("Name to sign in with").fill(f"{scheme}@example")
    await page.get_by_role("button", name="Invite").click()
    found += await findings(page)
    await page.goto(drawn)
    await wait_until_done(page)
    found += await findings(page)
    for path in (drawn.replace("playground", "history"), f"{site.base_url}/console/playground?prompt={PROMPT}&steps=0"):
        await page.goto(path)
        found += await findings(page)
    lora = site.run(site.resources.catalog.adapters(site.account.id))[0]
    await page.goto(f"{site.base_url}/console/loras/{lora.id}")
    found += await findings(page)
    await context.close()
    assert not found, "\n".join(found)
