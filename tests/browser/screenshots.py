"""Takes pictures of every page, light, dark and as a phone shows it, into var/screenshots.

The pages are those of `pages.py`, with more states of some. With `--docs` the pictures of the README are written again.
"""

import asyncio
import re
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from urllib.parse import urlencode

from PIL import Image
from playwright.async_api import Page, async_playwright

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.settings import Settings
from tests.browser import pages
from tests.browser.broken_lora import ask_for_images, break_lora, fail_job
from tests.browser.conftest import CHROMIUM
from tests.browser.site import Site, open_site, sign_in
from tests.support import ROOT, existing, volatile_redis

FLOWER = "a yellow flower with a red middle on a blue background"
HILLS = "a yellow sun over green hills under a blue sky"
OTHERS = (
    ("purple mountains under a black sky with a yellow moon", "Shadow", 1),
    ("a red boat with a white sail on blue water under a yellow sky", "Mosaic", 3),
    ("a large red heart in the center on a pink background", "Shadow", 3),
    ("a tree with green leaves on a yellow hill under a pink sky", "Confetti", 2),
)
"""The history shows these jobs, each with prompt, LoRA and seed, besides those of the playground's pictures."""
COMPARED = ("Blueprint", "Confetti", "Mosaic", "Neon", "Outline", "Sepia", "Shadow", "Stripes")
LOOKS: dict[str, tuple[Literal["light", "dark"], int]] = {
    "light": ("light", 1280),
    "dark": ("dark", 1280),
    "phone": ("light", 390),
}
FOR_A_NEW_ACCOUNT = ("playground", "compare", "history", "loras", "usage")
"""These pages of the console are also opened by an account without LoRAs and jobs."""
IN_README = {
    "console-playground-job": "playground",
    "console-compare-done": "compare",
    "console-history": "history",
    "console-loras": "loras",
}
"""Each of these screenshots becomes a file of docs/images."""
SHOWN, README_WIDTH = (1280, 1152), 1000
"""The README shows this much of a page from its top, scaled to this width."""
DRAWN_MS = 180_000
NO_SCROLLBAR = "html { scrollbar-gutter: auto !important; }"
"""Chromium without a window draws no scroll bar, but keeps its place free."""
_LOAD_PICTURES = """async () => {
  for (const each of document.images) each.loading = "eager";
  await Promise.all([...document.images].map((each) => each.decode()));
}"""


async def take(site: Site, into: Path) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        await take_signed_out(await browser.new_page(bypass_csp=True), site, into)
        await take_console(await browser.new_page(bypass_csp=True), site, into)
        await take_new_account(await browser.new_page(bypass_csp=True), site, into)
        await take_operators_pages(await browser.new_page(bypass_csp=True), site, into)
        await browser.close()


async def take_signed_out(page: Page, site: Site, into: Path) -> None:
    await take_pages(page, site, "/", pages.PUBLIC, into)
    await take_pages(page, site, "/", pages.SIGNED_OUT, into, link=site.sign_in_url().removeprefix(site.base_url))
    await take_pages(page, site, "/operators/", pages.OPERATORS_SIGNED_OUT, into)
    await page.goto(site.sign_in_url(purpose=LinkPurpose.NEW_PASSWORD))
    await take_looks(page, "console-new-password", into)


async def take_console(page: Page, site: Site, into: Path) -> None:
    """Take the console with jobs of the playground and of Compare, also while they are drawn."""
    await sign_in(page, site.sign_in_url())
    loras = {lora.name: lora.id for lora in site.run(site.resources.catalog.adapters(site.account.id))}
    for prompt, lora, seed in OTHERS:
        await open_form(page, site, "playground", prompt=prompt, lora_id=loras[lora], seed=seed)
        await page.get_by_role("button", name="Generate").click()
    await open_form(page, site, "compare", prompt=FLOWER, seed=3)
    for box in await page.get_by_role("checkbox").all():
        await box.set_checked(
            await box.get_attribute("name") in {f"lora:{loras[name]}" for name in COMPARED}, force=True
        )
    await page.get_by_role("button", name="Compare").click()
    await page.locator("img.preview").first.wait_for(timeout=DRAWN_MS)
    await take_looks(page, "console-compare-drawing", into)
    await page.get_by_role("heading", name="Done").wait_for(timeout=DRAWN_MS)
    await take_looks(page, "console-compare-done", into)
    await open_form(page, site, "playground", prompt=HILLS, lora_id=loras["Stripes"], seed=1, num_images=4)
    await page.get_by_role("button", name="Generate").click()
    await page.locator("img.preview").first.wait_for(timeout=DRAWN_MS)
    await take_looks(page, "console-playground-drawing", into)
    await page.get_by_role("heading", name="Done").wait_for(timeout=DRAWN_MS)
    job = page.url.rpartition("/")[2]
    await take_pages(page, site, "/console/", pages.CONSOLE, into, job=job, lora=loras["Stripes"])
    await page.goto(f"{site.base_url}/console/playground/{job}")
    await page.get_by_role("button", name="Upscale 2×").first.click()
    await page.wait_for_url("**/playground/up_*")
    await page.get_by_role("heading", name="Done").wait_for(timeout=DRAWN_MS)
    await take_looks(page, "console-playground-upscaled", into)
    await page.goto(f"{site.base_url}/console/settings/api")
    await page.get_by_role("button", name="Generate API key").click()
    await take_looks(page, "console-settings-api-new-key", into)
    await page.goto(f"{site.base_url}/console/settings/api")
    await take_looks(page, "console-settings-api-with-a-key", into)


async def take_new_account(page: Page, site: Site, into: Path) -> None:
    """Take pages of an account that may use no LoRA and has no job."""
    await sign_in(page, site.sign_in_url(site.run(site.account_without_loras("newcomer"))))
    for name in FOR_A_NEW_ACCOUNT:
        await page.goto(f"{site.base_url}/console/{name}")
        await take_looks(page, f"console-{name}-of-a-new-account", into)


async def take_operators_pages(page: Page, site: Site, into: Path) -> None:
    """Take the operators' pages with accounts, failed and waiting jobs, and a few acts."""
    for name, plan in (("acme", "professional"), ("north wind studio", "enterprise"), ("zeta", "basic")):
        site.run(site.resources.accounts.create(name, plan_a=plan))
    lora = site.run(break_lora(site.resources, into / "no such folder"))
    failed = [site.run(fail_job(site.resources, lora)) for _ in range(3)]
    acme = existing(site.run(site.resources.accounts.get("acme")))
    for _ in range(5):
        site.run(ask_for_images(site.resources, acme, "outline"))
    await sign_in(page, site.operator_url())
    await page.goto(f"{site.base_url}/operators/accounts/{acme.id}")
    await page.get_by_text("Replace a lost password").click()
    await page.get_by_role("button", name="Make a link").click()
    await take_looks(page, "operators-accounts-link", into)
    await take_pages(page, site, "/operators/", pages.OPERATORS, into, account=acme.id, job=failed[0])
    await page.goto(f"{site.base_url}/operators/checks")
    await page.get_by_role("button", name="Check now").click()
    await take_looks(page, "operators-checks-made", into)


async def take_pages(
    page: Page, site: Site, root: str, states: Mapping[str, tuple[str, ...]], into: Path, **values: str
) -> None:
    for address in chain.from_iterable(states.values()):
        path = address if address.startswith(("/", "{link}")) else root + address
        await page.goto(site.base_url + path.format(**values))
        await take_looks(page, re.sub(r"[^a-z0-9]+", "-", path).strip("-") or "landing", into)


async def take_looks(page: Page, name: str, into: Path) -> None:
    """Take the page as it is, without opening it again, since some are shown only once."""
    for look, (scheme, width) in LOOKS.items():
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.set_viewport_size({"width": width, "height": 900})
        await page.evaluate(_LOAD_PICTURES)
        await page.screenshot(path=into / f"{name}-{look}.png", full_page=True, style=NO_SCROLLBAR)
        print(f"{name}-{look}.png")  # noqa: T201 - what was written


async def open_form(page: Page, site: Site, name: str, **fields: str | int) -> None:
    await page.goto(f"{site.base_url}/console/{name}?{urlencode(fields)}")


def write_for_readme(into: Path) -> None:
    for name, file in IN_README.items():
        picture = Image.open(into / f"{name}-light.png").convert("RGB")
        width, height = SHOWN[0], min(SHOWN[1], picture.height)
        picture = picture.crop((0, 0, width, height))
        picture = picture.resize((README_WIDTH, height * README_WIDTH // width), Image.Resampling.LANCZOS)
        picture.save(ROOT / "docs" / "images" / f"{file}.webp", quality=82, method=6)


def main() -> None:
    into = ROOT / "var" / "screenshots"
    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, volatile_redis() as redis_url:
        settings = Settings(data_dir=Path(folder) / "var", redis_url=redis_url)
        with open_site(settings) as site:
            asyncio.run(take(site, into))
    if "--docs" in sys.argv:
        write_for_readme(into)


if __name__ == "__main__":
    main()
