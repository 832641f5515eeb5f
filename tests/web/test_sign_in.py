"""Sign-in, its limits, and the end of a session."""

import pytest

from serve_app.domain.accounts import Account
from tests.composition import Resources
from tests.web.browser import Browser, Page
from tests.web.conftest import PASSWORD, Browsers


async def test_the_right_password_opens_the_account_settings(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    page = await browser.sign_in("owner", PASSWORD)
    assert page.status == 200
    assert page.answer.url.path == "/console/settings"
    assert "Account settings" in page.text
    assert {"/console/settings/api", "/console/settings/api-keys"} <= set(page.links)


async def test_without_a_session_every_page_leads_to_the_sign_in(browsers: Browsers, owner: Account) -> None:
    for path in ("/console", "/console/", "/console/settings", "/console/settings/api", "/console/settings/api-keys"):
        page = await browsers.new().open(path)
        assert page.answer.url.path == "/console/sign-in", path


async def test_a_wrong_password_and_an_unknown_account_get_the_same_answer(browsers: Browsers, owner: Account) -> None:
    wrong = await browsers.new().sign_in("owner", "not the password")
    unknown = await browsers.new().sign_in("wonder", "not the password")
    assert wrong.status == unknown.status == 403
    assert _without_what_was_typed(wrong, "owner") == _without_what_was_typed(unknown, "wonder")


@pytest.mark.slow
async def test_a_disabled_account_does_not_get_in(browsers: Browsers, resources: Resources, owner: Account) -> None:
    await resources.accounts.set_disabled(owner.id, True)
    assert (await browsers.new().sign_in("owner", PASSWORD)).status == 403


async def test_disabling_an_account_ends_its_open_session(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    await resources.accounts.set_disabled(owner.id, True)
    assert (await browser.open("/console/settings")).answer.url.path == "/console/sign-in"


@pytest.mark.slow
async def test_an_account_without_a_password_does_not_get_in(browsers: Browsers, resources: Resources) -> None:
    await resources.accounts.create("machine")
    for password in ("", "None", "a password of no one"):
        assert (await browsers.new().sign_in("machine", password)).status == 403


@pytest.mark.parametrize(
    ("name", "password"), [("o" * 5000, "x"), ("owner", "p" * 5000), ("own\x00er", "\x00"), ("", "")]
)
async def test_odd_input_is_only_a_wrong_password(browsers: Browsers, owner: Account, name: str, password: str) -> None:
    assert (await browsers.new().sign_in(name, password)).status == 403


@pytest.mark.slow
async def test_a_session_is_new_at_every_sign_in(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    tokens: set[str | None] = set()
    for _ in range(2):
        await browser.sign_in("owner", PASSWORD)
        tokens.add(browser.http.cookies.get("atelier_session"))
        browser.http.cookies.delete("atelier_session")
    assert len(tokens) == 2


async def test_the_cookie_cannot_be_read_by_scripts_nor_sent_by_other_sites(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    browser.http.follow_redirects = False
    cookie = _set_cookie(await browser.sign_in("owner", PASSWORD), "atelier_session")
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= cookie
    assert "Secure" not in cookie


@pytest.mark.slow
async def test_over_https_the_cookie_is_bound_to_the_host(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new(origin="https://service.test")
    browser.http.follow_redirects = False
    page = await browser.sign_in("owner", PASSWORD)
    assert {"HttpOnly", "SameSite=lax", "Path=/", "Secure"} <= _set_cookie(page, "__Host-atelier_session")
    assert page.answer.headers["Strict-Transport-Security"]
    assert (await browser.open("/console/settings")).status == 200


@pytest.mark.slow
async def test_signing_out_ends_the_session_on_the_server_too(browser: Browser) -> None:
    token = browser.http.cookies["atelier_session"]
    page = await browser.open("/console/settings")
    assert (await browser.send(page.form("Sign out"))).answer.url.path == "/console/sign-in"
    browser.http.cookies.set("atelier_session", token)
    assert (await browser.open("/console/settings")).answer.url.path == "/console/sign-in"


@pytest.mark.slow
async def test_signing_out_everywhere_ends_every_session(browser: Browser, browsers: Browsers, owner: Account) -> None:
    other = browsers.new()
    await other.sign_in("owner", PASSWORD)
    page = await browser.open("/console/settings")
    await browser.send(page.form("Sign out everywhere"), everywhere="yes")
    for each in (browser, other):
        assert (await each.open("/console/settings")).answer.url.path == "/console/sign-in"


@pytest.mark.slow
async def test_an_ordinary_sign_out_leaves_the_other_sessions(
    browser: Browser, browsers: Browsers, owner: Account
) -> None:
    other = browsers.new()
    await other.sign_in("owner", PASSWORD)
    page = await browser.open("/console/settings")
    await browser.send(page.form("Sign out"))
    assert (await other.open("/console/settings")).status == 200


@pytest.mark.slow
async def test_getting_in_forgets_the_wrong_guesses(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    for _ in range(3):
        for _ in range(4):
            await browser.sign_in("owner", "a wrong password")
        assert (await browser.sign_in("owner", PASSWORD)).status == 200
        browser.http.cookies.delete("atelier_session")


def _without_what_was_typed(page: Page, name: str) -> str:
    """The page's bytes, less the name that is shown again and the form token, which is random."""
    token = page.form("Sign in").fields["form_token"]
    return page.answer.text.replace(token, "").replace(f'value="{name}"', "")


def _set_cookie(page: Page, name: str) -> set[str]:
    """The attributes of the cookie that the answer sets."""
    lines = page.answer.headers.get_list("set-cookie")
    return set(next(line for line in lines if line.startswith(name + "=")).split("; ")[1:])
