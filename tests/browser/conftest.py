"""A service that draws, and a Chromium of this machine."""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from serve_app.loras.weights import LAYER_TABLES
from serve_app.settings import Settings
from tests.browser.site import Site, open_site, sign_in
from tests.support import volatile_redis

expect.set_options(timeout=30_000)  # tests in other processes need the cores, too
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup")
"""Chromium 156 would start another renderer with each context, for the suggestions of an address bar that nobody sees."""
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a Chromium where there is none, in one line for all."""
    lost = [item for item in items if "chromium" in getattr(item, "fixturenames", ())]
    if CHROMIUM is None and lost:
        reason = f"no Chromium here, which {len(lost)} tests of tests/browser need: apt-get install chromium"
        lost[0].add_marker(pytest.mark.skip(reason))
        config.hook.pytest_deselected(items=lost[1:])
        items[:] = [item for item in items if item not in lost[1:]]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, layer_tables: Path) -> Iterator[Site]:
    data_dir = tmp_path_factory.mktemp("site") / "var"
    data_dir.mkdir()
    (data_dir / LAYER_TABLES).symlink_to(layer_tables)
    with volatile_redis() as redis_url, open_site(Settings(data_dir=data_dir, redis_url=redis_url)) as site:
        yield site


@pytest.fixture(scope="session")
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest.fixture
async def context(chromium: Browser, tmp_path: Path) -> AsyncIterator[BrowserContext]:
    """A browser of its own for each test; an error of a page's script fails it."""
    context = await chromium.new_context(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    context.on("weberror", lambda error: errors.append(str(error.error)))
    context.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield context
    await context.close()
    assert not errors


@pytest.fixture
async def anyone(chromium: Browser) -> AsyncIterator[BrowserContext]:
    """A browser of its own, in which a test may meet errors."""
    context = await chromium.new_context()
    yield context
    await context.close()


@pytest.fixture
async def page(context: BrowserContext, site: Site) -> Page:
    """A page that was signed in by a link, as for a new user after `make run`."""
    page = await context.new_page()
    await sign_in(page, site.sign_in_url())
    return page


@pytest.fixture
async def unwatched(anyone: BrowserContext, site: Site) -> Page:
    """A page that was signed in, where answers of errors are a part of the flow."""
    page = await anyone.new_page()
    await sign_in(page, site.sign_in_url())
    return page
