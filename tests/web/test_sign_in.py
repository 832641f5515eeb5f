"""Sign-in, its limits, and the end of a session."""

import pytest

from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act
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


@pytest.mark.parametrize(
    ("wanted", "part_of"),
    [
        ("history?state=failed&from=2026-01-02", ""),
        ("verify", "playground/job_x?seed=1"),
    ],
)
async def test_a_sign_in_leads_on_to_the_page_that_was_wanted_where_errors_keep_the_navigation(
    browsers: Browsers, owner: Account, wanted: str, part_of: str
) -> None:
    browser = browsers.new()
    if part_of:
        htmx = {"HX-Request": "true", "HX-Current-URL": f"http://service.test/console/{part_of}"}
        answer = await browser.http.get("/console/history", headers=htmx)
        opened = await browser.open(answer.headers["hx-redirect"])
        wanted = part_of
    else:
        opened = await browser.open(f"/console/{wanted}")
    page = await browser.send(opened.form("Sign in"), name="owner", password=PASSWORD)
    assert str(page.answer.url) == f"http://service.test/console/{wanted}"
    assert "/console/playground" in page.links
    for next_ in ("//evil.example", "/x", "https://evil.example", "x\\@evil.example", "a b"):
        opened = await browsers.new().http.get("/console/sign-in", params={"next": next_})
        assert Page(opened).form("Sign in").fields.get("next", "") == "", next_


async def test_a_wrong_password_and_an_unknown_account_get_the_same_answer(browsers: Browsers, owner: Account) -> None:
    wrong = await browsers.new().sign_in("owner", "not the password")
    unknown = await browsers.new().sign_in("wonder", "not the password")
    assert wrong.status == unknown.status == 403
    assert _without_what_was_typed(wrong, "owner") == _without_what_was_typed(unknown, "wonder")


@pytest.mark.parametrize(
    ("name", "password"), [("o" * 5000, "x"), ("owner", "p" * 5000), ("own\x00er", "\x00"), ("", "")]
)
async def test_odd_input_is_only_a_wrong_password(browsers: Browsers, owner: Account, name: str, password: str) -> None:
    assert (await browsers.new().sign_in(name, password)).status == 403


@pytest.mark.parametrize(
    ("origin", "name", "expected"),
    [
        ("http://service.test", "atelier_session", set[str]()),
        ("https://service.test", "__Host-atelier_session", {"Secure"}),
    ],
)
async def test_the_cookie_is_not_for_scripts_nor_other_sites_and_over_https_bound_to_the_host(
    browsers: Browsers, owner: Account, origin: str, name: str, expected: set[str]
) -> None:
    browser = browsers.new(origin=origin)
    browser.http.follow_redirects = False
    page = await browser.sign_in("owner", PASSWORD)
    lines = [line for line in page.answer.headers.get_list("set-cookie") if line.startswith(f"{name}=")]
    cookie = set(lines[0].split("; "))
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= cookie
    assert cookie & {"Secure"} == expected
    assert ("Strict-Transport-Security" in page.answer.headers) == bool(expected)
    assert (await browser.open("/console/settings")).status == 200


@pytest.mark.slow
async def test_signing_out_ends_the_session_on_the_server_too(browser: Browser) -> None:
    token = browser.http.cookies["atelier_session"]
    assert (await browser.press("/console/settings", "Sign out")).answer.url.path == "/console/sign-in"
    browser.http.cookies.set("atelier_session", token)
    assert (await browser.open("/console/settings")).answer.url.path == "/console/sign-in"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("button", "fields", "act"),
    [
        ("Sign out", {}, Act.SIGNED_OUT),
        ("Sign out everywhere", {"everywhere": "yes"}, Act.SIGNED_OUT_EVERYWHERE),
    ],
)
async def test_signing_out_leaves_other_sessions_unless_it_is_everywhere(
    browser: Browser, browsers: Browsers, resources: Resources, owner: Account, button: str,
    fields: dict[str, str], act: Act,
) -> None:  # fmt: skip
    other = await browsers.signed_in()
    await browser.press("/console/settings", button, **fields)
    ended = [(await each.open("/console/settings")).answer.url.path == "/console/sign-in" for each in (browser, other)]
    assert ended == [True, bool(fields)]
    assert [row.act for row in await resources.audit.rows(owner.id)] == [Act.SIGNED_IN, Act.SIGNED_IN, act]


@pytest.mark.slow
async def test_every_act_in_the_console_leaves_exactly_one_row(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    browser = browsers.new(address="203.0.113.99")
    await browser.sign_in("owner", "not the password")
    await browser.sign_in("owner", PASSWORD)
    await browser.press("/console/settings/api", "Generate API key", key_name="website")
    [key] = await resources.api_keys.list(owner.id)
    await browser.press("/console/settings/api", "Revoke this key")
    await browser.press(
        "/console/settings/password",
        "Change password",
        password="wrong",
        new_password="n" * 12,
        new_password_again="n" * 12,
    )
    await browser.press("/console/settings", "Sign out")
    rows = await resources.audit.rows(owner.id)
    assert [(row.actor, row.act, row.subject) for row in rows] == [
        ("anyone", Act.SIGN_IN_FAILED, ""),
        ("owner", Act.SIGNED_IN, ""),
        ("owner", Act.KEY_CREATED, key.id),
        ("owner", Act.KEY_REVOKED, key.id),
        ("owner", Act.SIGN_IN_FAILED, ""),
        ("owner", Act.SIGNED_OUT, ""),
    ]
    assert {row.address for row in rows} == {"203.0.113.99"}


@pytest.mark.slow
async def test_getting_in_forgets_the_wrong_guesses(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    for _ in range(3):
        for _ in range(4):
            await browser.sign_in("owner", "a wrong password")
        assert (await browser.sign_in("owner", PASSWORD)).status == 200
        browser.http.cookies.delete("atelier_session")


def _without_what_was_typed(page: Page, name: str) -> str:
    """Return the page without the name, which is shown again, and the form token, which is random."""
    token = page.form("Sign in").fields["form_token"]
    return page.answer.text.replace(token, "").replace(f'value="{name}"', "")
