"""No page violates axe-core or scrolls sideways in any state, light or dark, wide or on a phone."""

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from fastapi.routing import APIRoute
from playwright.async_api import BrowserContext, Page, expect

from serve_app.accounts.sign_in import HERE, LinkPurpose
from serve_app.domain.accounts import Role
from serve_app.domain.jobs import JobState
from serve_app.domain.requests import ImageFormat
from serve_app.marking.certificates import make_for_development
from serve_app.marking.drawing_texts import A1111
from serve_app.marking.marker import Marker
from serve_app.marking.xmp import SourceType
from serve_app.store.keys import redis_key
from serve_app.web import console, operators
from serve_app.web.console.settings import TRIES
from serve_app.web.docs.routes import docs_router
from serve_app.worker.image_files import encode
from tests.browser import pages
from tests.browser.broken_lora import break_lora, fail_job
from tests.browser.checks import findings
from tests.browser.site import Site, sign_in
from tests.browser.test_flows import job_of, wait_until_done
from tests.marking.test_watermark import photo
from tests.support import existing, plain_redis

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]

_OPEN_ALL = "document.querySelectorAll('main details').forEach((each) => { each.open = true; })"


def test_the_checks_go_through_every_page_of_the_service(site: Site) -> None:
    docs = docs_router({})
    for routes, known in (
        (docs.routes, pages.PUBLIC),
        (console.console_app().routes, {**pages.SIGNED_OUT, **pages.CONSOLE, "/": ()}),  # "/" leads to one of them
        (operators.operators_app().routes, {**pages.OPERATORS_SIGNED_OUT, **pages.OPERATORS}),
    ):
        paths = {each.path for each in routes if isinstance(each, APIRoute) and "GET" in (each.methods or ())}
        assert paths - pages.NO_PAGES == set(known)


@pytest.fixture
async def page(anyone: BrowserContext) -> Page:
    return await anyone.new_page()


async def test_pages_for_anyone(page: Page, site: Site) -> None:
    found: list[str] = []
    for path in _addresses((pages.PUBLIC, pages.SIGNED_OUT), link=site.sign_in_url().removeprefix(site.base_url)):
        await page.goto(site.base_url + path, wait_until="load")
        if path.startswith("/docs"):
            await page.evaluate(_OPEN_ALL)
        found += await findings(page)
    await page.goto(site.sign_in_url(purpose=LinkPurpose.NEW_PASSWORD))
    found += await findings(page)
    found += await _sent(page, "Set password and sign in", new_password="short", new_password_again="other")
    await page.goto(f"{site.base_url}/console/sign-in")
    found += await _sent(page, "Sign in", name="nobody", password="wrong")
    for _ in range(HERE.free):
        site.run(site.resources.sign_ins.count("hasty", "127.0.0.1", None))
    found += await _sent(page, "Sign in", name="hasty", password="wrong")
    await expect(page.get_by_role("main")).to_contain_text("Too many attempts")
    with _read_only_redis(site):
        found += await _sent(page, "Sign in", name="nobody", password="wrong")
    await expect(page.get_by_role("heading")).to_have_text("Temporarily unavailable")
    for path in _addresses((pages.OPERATORS_SIGNED_OUT,)):
        await page.goto(f"{site.base_url}/operators/{path}")
        found += await findings(page)
    assert not found, "\n".join(found)


async def test_the_console_as_it_is_used(page: Page, site: Site) -> None:
    """The pages are checked while a job is drawn, when done, with a new key, an invitation and a picture's marks."""
    await sign_in(page, site.sign_in_url())
    drawn = await job_of(page, site, steps=20)
    found = await findings(page)
    lora = site.run(site.resources.catalog.adapters(site.account.id))[0]
    await wait_until_done(page)
    for path in _addresses((pages.CONSOLE,), job=drawn.rpartition("/")[2], lora=lora.id):
        await page.goto(f"{site.base_url}/console/{path}")
        found += await findings(page)
    await page.goto(f"{site.base_url}/console/settings/api")
    await page.get_by_text("Expiry, limit and permissions").click()
    found += await _sent(page, "Generate API key", key_name="a name " * 8)
    found += await _sent(page, "Roll this key")
    for path in (f"history/{drawn.rpartition('/')[2]}", f"playground/{drawn.rpartition('/')[2]}"):
        await page.goto(f"{site.base_url}/console/{path}")
        await page.evaluate(_OPEN_ALL)
        found += await findings(page)
    await page.goto(f"{site.base_url}/console/settings/users")
    found += await _sent(page, "Invite", name="of-the-checks@example")
    settings, form = site.resources.settings, ImageFormat.PNG
    make_for_development(*settings.marking_files)
    texts = {
        A1111: f"{'a boat ' * 99}\nNegative prompt: {'tree' * 99}\nSteps: 20",
        "invokeai_metadata": '{"seed":1}' * 40,
    }
    marked = Marker(settings).mark(
        photo(64, 64), form, SourceType.COMPOSITE, lambda pixels, xmp: encode(pixels, form, texts=texts, xmp=xmp)
    )
    for file, words in ((marked, "What was found"), (b"", "choose a PNG")):
        await page.goto(f"{site.base_url}/console/verify")
        await page.get_by_label("Picture").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": file})
        found += await _sent(page, "Read its marks")
        await expect(page.get_by_role("main")).to_contain_text(words)
    assert not found, "\n".join(found)


AS_WIDE_AS_IDS_BECOME = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(/_[a-z2-7]{26}/g, '_' + 'w'.repeat(26));
}"""
"""Ids are random, and in a font of letters of different widths some are much wider than others."""


async def test_the_console_where_something_is_refused(page: Page, site: Site, tmp_path: Path) -> None:
    """The account has a LoRA and a failed job, and its forms come back with what is wrong."""
    lora = site.run(break_lora(site.resources, tmp_path, name="Worn ink"))
    job_id = site.run(fail_job(site.resources, lora))
    account = existing(site.run(site.resources.accounts.get("acme")))
    await sign_in(page, site.sign_in_url(account))
    found: list[str] = []
    for path in (f"playground/{job_id}", f"history/{job_id}", "history", "loras", f"loras/{lora.id}"):
        await page.goto(f"{site.base_url}/console/{path}")
        await page.evaluate(AS_WIDE_AS_IDS_BECOME)
        found += await findings(page)
    for path, button, fields in (
        ("playground", "Generate", {"prompt": "a boat", "seed": "x"}),
        ("compare", "Compare", {"prompt": "a boat", "seed": "x"}),
        (f"loras/{lora.id}", "Save", {"name": ""}),
        (f"loras/{lora.id}", "Share", {"account": "nobody"}),
        ("loras/new", "Upload and check", {"name": ""}),
        ("settings/users", "Invite", {"name": "no address"}),
        ("settings/password", "Change password", {"password": "wrong", "new_password": "x", "new_password_again": "y"}),
    ):
        await page.goto(f"{site.base_url}/console/{path}")
        found += await _sent(page, button, **fields)
        assert "acme" in await page.content(), f"{path}: the form came back"
    for _ in range(TRIES.tries):
        site.run(site.resources.throttle.hit(TRIES, account.id))
    await page.goto(f"{site.base_url}/console/settings/users")
    found += await _sent(page, "Invite", name="one-too-many@example")
    await expect(page.get_by_role("heading")).to_have_text("Too many requests")
    await page.goto(f"{site.base_url}/console/playground")
    await page.locator("[name=prompt]").evaluate(
        "(field) => { field.value = 'boat '.repeat(100_000); field.removeAttribute('maxlength'); }"
    )
    found += await _sent(page, "Generate")
    await expect(page.get_by_role("main")).to_contain_text("too large")
    with _written_by_a_newer_version(site, job_id):
        await page.goto(f"{site.base_url}/console/history/{job_id}")
        await expect(page.get_by_role("heading")).to_contain_text("cannot be read")
        found += await findings(page)
    assert not found, "\n".join(found)


async def test_the_console_of_who_has_nothing_yet_or_may_open_little(page: Page, site: Site) -> None:
    account = site.run(site.account_without_loras("empty"))
    await sign_in(page, site.sign_in_url(account))
    found: list[str] = []
    for path in ("playground", "compare", "history", "loras", "usage", "settings", "settings/api"):
        await page.goto(f"{site.base_url}/console/{path}")
        found += await findings(page)
    biller = site.run(site.resources.users.create(account.id, "biller@example", Role.BILLING))
    await page.context.clear_cookies()
    await sign_in(page, site.sign_in_url(account, biller.id))
    for path in ("usage", "settings", "history"):
        await page.goto(f"{site.base_url}/console/{path}")
        found += await findings(page)
    assert not found, "\n".join(found)


async def test_the_operators_pages(page: Page, site: Site, tmp_path: Path) -> None:
    lora = site.run(break_lora(site.resources, tmp_path, name="Torn ink"))
    jobs = [site.run(fail_job(site.resources, lora)) for _ in range(2)]
    acme = existing(site.run(site.resources.accounts.get("acme")))
    await page.goto(site.operator_url())
    found = await findings(page)
    await page.get_by_role("button", name="Sign in").click()
    for path in _addresses((pages.OPERATORS,), account=acme.id, job=jobs[0]):
        await page.goto(f"{site.base_url}/operators/{path}")
        found += await findings(page)
    await page.goto(f"{site.base_url}/operators/checks")
    found += await _sent(page, "Check now")
    await page.goto(f"{site.base_url}/operators/accounts/{acme.id}")
    await page.get_by_text("Replace a lost password").click()
    found += await _sent(page, "Make a link")
    await page.goto(f"{site.base_url}/operators/failures")
    found += await _sent(page, "Drop")
    assert not found, "\n".join(found)


def _addresses(groups: Iterable[Mapping[str, tuple[str, ...]]], **values: str) -> list[str]:
    return [address.format(**values) for group in groups for addresses in group.values() for address in addresses]


async def _sent(page: Page, button: str, **fields: str) -> list[str]:
    """Return what is wrong with the page that answers the form with this button.

    The browser itself does not check the form.
    """
    await page.evaluate("document.querySelectorAll('form').forEach((form) => { form.noValidate = true; })")
    await page.evaluate(_OPEN_ALL)
    name = re.compile(f"^{button}")
    form = page.locator("main form").filter(has=page.get_by_role("button", name=name)).first
    for field, value in fields.items():
        await form.locator(f"[name={field}]").fill(value)
    await form.get_by_role("button", name=name).click()
    await page.wait_for_load_state()
    return await findings(page)


@contextmanager
def _written_by_a_newer_version(site: Site, job_id: str) -> Generator[None]:
    """Give a job a state that this version does not know, until the block ends."""
    with plain_redis(site.resources.settings.redis_url) as records:
        records.hset(redis_key("job", job_id), "state", "a new one")
        yield
        records.hset(redis_key("job", job_id), "state", JobState.FAILED)


@contextmanager
def _read_only_redis(site: Site) -> Generator[None]:
    """Have Redis refuse every write until the block ends: it waits for a replica that there is not."""
    with redis.Redis.from_url(site.resources.settings.redis_url) as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)
