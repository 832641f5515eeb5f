"""What is asked of a page in any state: nothing that axe-core finds, light and dark, and nothing that scrolls sideways."""

from typing import Any, cast

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

WIDE, PHONE = 1280, 390
_ALL = {"resultTypes": ["violations"]}
_CONTRAST = {**_ALL, "runOnly": ["color-contrast"]}
"""The one rule whose verdict a dark page can change."""
_axe = cast(Any, Axe())


async def findings(page: Page) -> list[str]:
    """What is wrong with the page as it is now, as lines: its address, the rule, and the first element of each."""
    await page.set_viewport_size({"width": PHONE, "height": 844})
    found = await _sideways(page)
    await page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    await page.set_viewport_size({"width": WIDE, "height": 900})
    found += await _violations(page, _CONTRAST) + await _sideways(page)
    await page.emulate_media(color_scheme="light", reduced_motion="reduce")
    return found + await _violations(page, _ALL)


async def _sideways(page: Page) -> list[str]:
    beyond = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [f"{page.url}: scrolls sideways by {beyond} pixels"] if beyond > 0 else []


async def _violations(page: Page, options: dict[str, list[str]]) -> list[str]:
    result = await _axe.run(page, options=options)
    look = "dark" if options is _CONTRAST else "light"
    return [
        f"{page.url}, {look}: {found['id']}: {found['nodes'][0]['html'][:160]}"
        for found in result.response["violations"]
    ]
