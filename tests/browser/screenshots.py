"""Takes screenshots of every page, light, dark and as on a phone: `make screenshots`.

They are written to var/screenshots; with `--docs` those of the README are written anew.
"""

import asyncio
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from PIL import Image
from playwright.async_api import Page, async_playwright

from serve_app.settings import Settings
from tests.browser.broken_lora import ask_for_images, break_lora, fail_job
from tests.browser.conftest import CHROMIUM
from tests.browser.site import Site, open_site
from tests.support import ROOT, volatile_redis

FLOWER = "a yellow flower with a red middle on a blue background"
MOUNTAINS = "purple mountains under a black sky with a yellow moon"
LOOKS: dict[str, tuple[Literal["light", "dark"], int]] = {
    "light": ("light", 1280),
    "dark": ("dark", 1280),
    "phone": ("light", 390),
}
PAGES = ("history", "loras", "loras/new", "usage", "settings", "settings/api", "settings/password", "settings/users")
IN_README = {"compare-light": "compare"}
"""Screenshot → file of docs/images."""
WIDTH = 1000


async def take(site: Site, into: Path) -> None:
    """Draw with the playground and Compare, then take every page."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        await page.goto(site.sign_in_url())
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url("**/console/playground")
        drawn = await draw(page, f"{site.base_url}/console/playground?prompt={MOUNTAINS}&seed=1", "Generate")
        compared = await draw(page, f"{site.base_url}/console/compare?prompt={FLOWER}&seed=3", "Compare")
        addresses = {"landing": f"{site.base_url}/", "docs": f"{site.base_url}/docs"}
        addresses |= {"playground": drawn, "compare": compared}
        addresses |= {name.replace("/", "-"): f"{site.base_url}/console/{name}" for name in PAGES}
        for look, (scheme, width) in LOOKS.items():
            await page.emulate_media(color_scheme=scheme)
            await page.set_viewport_size({"width": width, "height": 844})
            for name, address in addresses.items():
                await page.goto(address, wait_until="networkidle")
                await page.screenshot(path=into / f"{name}-{look}.png", full_page=True)
                print(f"{name}-{look}.png")  # noqa: T201 - what was written
        await browser.close()


async def take_operators_pages(site: Site, into: Path) -> None:
    """With accounts, a failed job, one that is done and a few acts to show."""
    for name, plan in (("acme", "professional"), ("north wind studio", "enterprise"), ("zeta", "basic")):
        site.run(site.resources.accounts.create(name, plan_a=plan))
    lora = site.run(break_lora(site.resources, into / "no such folder"))
    job_ids = [site.run(fail_job(site.resources, lora)) for _ in range(3)]
    acme = site.run(site.resources.accounts.get("acme"))
    assert acme is not None
    for _ in range(5):
        site.run(ask_for_images(site.resources, acme, "outline"))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        root = f"{site.base_url}/operators"
        await page.goto(f"{root}/sign-in")
        await take_looks(page, "operators-sign-in", into)
        await page.goto(site.operator_url())
        await page.get_by_role("button", name="Sign in").click()
        await page.goto(f"{root}/accounts/{acme.id}")
        await page.get_by_text("A lost password").click()
        await page.get_by_role("button", name="Make a link").click()
        await take_looks(page, "operators-link", into)
        for name in ("", "accounts", f"accounts/{acme.id}", "failures", f"jobs/{job_ids[0]}", "models", "audit"):
            await page.goto(f"{root}/{name}")
            await take_looks(page, f"operators-{name.partition('_')[0].replace('/', '-') or 'overview'}", into)
        await page.goto(f"{root}/checks")
        await page.get_by_role("button", name="Check now").click()
        await take_looks(page, "operators-checks", into)
        await browser.close()


async def take_looks(page: Page, name: str, into: Path) -> None:
    """The page as it is, without opening it again: some are shown once."""
    for look, (scheme, width) in LOOKS.items():
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.set_viewport_size({"width": width, "height": 844})
        await page.screenshot(path=into / f"{name}-{look}.png", full_page=True)
        print(f"{name}-{look}.png")  # noqa: T201 - what was written


async def draw(page: Page, address: str, button: str) -> str:
    """Send the form at this address and return the address of its result.

    Where several LoRAs can be chosen, all are.
    """
    await page.goto(address)
    for box in await page.get_by_role("checkbox").all():
        await box.check(force=True)
    await page.get_by_role("button", name=button).click()
    await page.get_by_role("heading", name="Done").wait_for(timeout=180_000)
    return page.url


def main() -> None:
    into = ROOT / "var" / "screenshots"
    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, volatile_redis() as redis_url:
        settings = Settings(data_dir=Path(folder) / "var", redis_url=redis_url)
        with open_site(settings) as site:
            asyncio.run(take(site, into))
            asyncio.run(take_operators_pages(site, into))
    if "--docs" in sys.argv:
        for name, file in IN_README.items():
            picture = Image.open(BytesIO((into / f"{name}.png").read_bytes())).convert("RGB")
            picture = picture.resize((WIDTH, picture.height * WIDTH // picture.width), Image.Resampling.LANCZOS)
            picture.save(ROOT / "docs" / "images" / f"{file}.webp", quality=82, method=6)


if __name__ == "__main__":
    main()
