"""Attacks in a browser fail: forms of another site, fixed sessions, guesses, markup in names."""

import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import BrowserContext, Page, Route, expect

from serve_app.domain.accounts import Role
from tests.browser.checks import findings
from tests.browser.site import Site, sign_in
from tests.support import adapter_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]

HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>'"
ELSEWHERE = "http://elsewhere.test/"
REFLECTING = (
    "console/history?state={0}&lora={0}&key={0}&from={0}",
    "console/playground?prompt={0}&lora_id={0}&seed={0}&find={0}",
    "console/compare?prompt={0}",
    "console/usage?days={0}",
    "console/{0}",
    "operators/accounts?name={0}",
    "operators/failures?account={0}&code={0}",
    "operators/models?account={0}",
    "operators/audit?act={0}&account={0}",
    "docs/{0}",
)


@pytest.mark.parametrize("method", ["post", "get"])
async def test_a_form_of_another_site_makes_no_key(anyone: BrowserContext, site: Site, method: str) -> None:
    page = await _signed_in(anyone, site)
    before = site.run(site.resources.api_keys.list(site.account.id))
    target = f"{site.base_url}/console/settings/api"
    fields = {
        "key_name": "theirs",
        "scope_read": "yes",
        "expires": "",
        "limit": "",
        "lora": "",
    }  # the form token is missing
    inputs = "".join(f'<input name="{name}" value="{value}">' for name, value in fields.items())
    form = f'<form method="{method}" action="{target}">{inputs}</form>'

    async def answer(route: Route) -> None:
        await route.fulfill(content_type="text/html", body=f"{form}<script>document.forms[0].submit()</script>")

    await page.route(f"{ELSEWHERE}**", answer)
    await page.goto(ELSEWHERE)
    await page.wait_for_url(f"{site.base_url}/**")
    assert site.run(site.resources.api_keys.list(site.account.id)) == before
    await page.goto(target)
    await expect(page.get_by_role("button", name="Generate API key")).to_be_visible()


async def test_signing_in_replaces_a_session_that_was_set_beforehand(anyone: BrowserContext, site: Site) -> None:
    page = await _signed_in(anyone, site)
    [name] = [each.get("name", "") for each in await anyone.cookies() if "session" in each.get("name", "")]
    await anyone.clear_cookies()
    await anyone.add_cookies([{"name": name, "value": "known-to-an-attacker", "url": site.base_url}])
    await sign_in(page, site.sign_in_url())
    [value] = [each.get("value") for each in await anyone.cookies() if each.get("name") == name]
    assert value != "known-to-an-attacker"
    await anyone.clear_cookies()
    await anyone.add_cookies([{"name": name, "value": "known-to-an-attacker", "url": site.base_url}])
    await page.goto(f"{site.base_url}/console/history")
    await expect(page).to_have_url(re.compile("/console/sign-in"))


async def test_the_sixth_guess_of_a_password_waits(anyone: BrowserContext, site: Site) -> None:
    site.run(site.resources.accounts.create("guessed", password="a long and safe password"))
    page = await anyone.new_page()
    await page.goto(f"{site.base_url}/console/sign-in")
    for guess in range(6):
        await page.get_by_label("Account or user").fill("guessed")
        await page.get_by_label("Password").fill(f"a guess, the {guess}th" if guess < 5 else "a long and safe password")
        await page.get_by_role("button", name="Sign in").click()
        said = "Wrong name or password." if guess < 5 else "Too many attempts"
        await expect(page.get_by_role("alert")).to_contain_text(said)
    assert not await findings(page)


async def test_markup_in_names_and_addresses_is_text(anyone: BrowserContext, site: Site) -> None:
    """A violation of the content security policy is an error in the browser, too."""
    refused: list[str] = []
    anyone.on("console", lambda message: refused.append(message.text) if "Content Security" in message.text else None)
    anyone.on("weberror", lambda error: refused.append(str(error.error)))
    account = site.run(site.resources.accounts.create("hostile"))
    user = site.run(site.resources.users.create(account.id, "<script>document.title='pwned'</script>@x", Role.OWNER))
    lora = adapter_of(account.id, name=HOSTILE, description=HOSTILE, trigger_words=(HOSTILE[:60],))
    site.run(site.resources.adapter_registry.register(lora))
    page = await anyone.new_page()
    for address in (site.sign_in_url(account, user.id), site.operator_url()):
        await sign_in(page, address)
    console = ("playground", "compare", "loras", f"loras/{lora.id}", "history", "usage", "settings/users")
    operators = ("models", f"accounts/{account.id}", "audit")
    named = (*(f"console/{path}" for path in console), *(f"operators/{path}" for path in operators))
    async for path in _opened(page, site, (*named, *(path.format(HOSTILE) for path in REFLECTING))):
        assert await page.title() != "pwned", path
        assert await page.locator("img[src=x]").count() == 0, path
    site.run(site.resources.adapter_registry.remove(lora.id))
    assert not refused


async def _opened(page: Page, site: Site, paths: tuple[str, ...]) -> AsyncIterator[str]:
    for path in paths:
        await page.goto(f"{site.base_url}/{path}")
        yield path


async def _signed_in(context: BrowserContext, site: Site) -> Page:
    page = await context.new_page()
    await sign_in(page, site.sign_in_url())
    return page
