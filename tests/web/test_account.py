"""Links that sign in once, and the change of a password."""

import pytest
import redis

from serve_app.accounts.sessions import digest_of
from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account
from serve_app.domain.audit import OWNER, Act
from serve_app.store.keys import redis_key
from tests.api.app import Member, TestService
from tests.composition import Resources
from tests.support import lora_record
from tests.web.browser import Browser
from tests.web.conftest import PASSWORD, Browsers

NEW = "a new and better password"


@pytest.fixture
async def link(resources: Resources, owner: Account) -> str:
    """The address of a link that signs the owner in."""
    return "/console/links/" + await resources.sign_in_links.create(owner.id, LinkPurpose.SIGN_IN)


@pytest.fixture
async def reset(resources: Resources, owner: Account) -> str:
    """The address of a link for a lost password."""
    return "/console/links/" + await resources.sign_in_links.create(owner.id, LinkPurpose.NEW_PASSWORD)


async def is_signed_in(browser: Browser) -> bool:
    return "Sign out" in (await browser.open("/console/settings")).text


@pytest.mark.slow
async def test_a_link_signs_in_once(browsers: Browsers, link: str, resources: Resources, owner: Account) -> None:
    first, second = browsers.new(), browsers.new()
    page = await first.open(link)
    assert "owner" in page.text
    late = await second.open(link)  # a look at it does not use it
    assert (await first.send(page.form("Sign in"))).status == 200
    assert await is_signed_in(first)
    assert (await second.send(late.form("Sign in"))).status == 404
    assert (await second.open(link)).status == 404
    assert not await is_signed_in(second)
    newest = (await resources.audit.rows(owner.id))[-1]
    assert newest.act == Act.SIGNED_IN


async def test_the_button_of_another_browser_does_not_sign_in(browsers: Browsers, link: str) -> None:
    """Otherwise an attacker could sign somebody in to the attacker's account."""
    form = (await browsers.new().open(link)).form("Sign in")
    other = browsers.new()
    await other.open(link)
    assert (await other.send(form)).status == 403
    assert not await is_signed_in(other)


async def test_redis_holds_a_link_as_a_digest_for_a_day(link: str, redis_db: redis.Redis) -> None:
    token = link.rpartition("/")[2]
    assert not redis_db.exists(redis_key("sign_in_link", token))
    (name,) = redis_db.keys(redis_key("sign_in_link", "*"))  # pyright: ignore[reportGeneralTypeIssues]
    assert 0 < redis_db.ttl(name) <= 86_400  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("token", ["nothing", "%00", "x" * 500])
async def test_an_invented_link_is_not_found(browsers: Browsers, token: str) -> None:
    assert (await browsers.new().open(f"/console/links/{token}")).status == 404


@pytest.mark.parametrize("change", ["password", "disabled", "disabled and enabled"])
async def test_a_link_is_void_when_the_account_has_changed(
    browsers: Browsers, resources: Resources, owner: Account, link: str, reset: str, change: str
) -> None:
    late = browsers.new()
    form = (await late.open(link)).form("Sign in")
    if change == "password":
        await resources.accounts.set_password(owner.id, NEW)
    else:
        await resources.accounts.set_disabled(owner.id, True)
        if change == "disabled and enabled":
            await resources.accounts.set_disabled(owner.id, False)
    assert (await late.send(form)).status == 404
    assert (await browsers.new().open(reset)).status == 404
    assert not await is_signed_in(late)


async def test_sessions_are_listed_and_ended(browser: Browser, browsers: Browsers) -> None:
    phone, laptop = [
        await browsers.signed_in(headers={"User-Agent": agent})
        for agent in ("Firefox/140.0 Android", "Windows Chrome/140")
    ]
    page = await browser.open("/console/settings")
    assert all(words in page.text for words in ("Firefox on Android", "Chrome on Windows", "this one"))
    chosen = next(form for form in page.forms if form.action.endswith(f"{session_of(phone)}/end"))
    assert (await browser.send(chosen, form_token="")).status == 403
    assert (await browser.send(chosen)).status == 200
    assert [await is_signed_in(each) for each in (phone, laptop, browser)] == [False, True, True]
    await browser.press("/console/settings", "End all others")
    assert [await is_signed_in(each) for each in (laptop, browser)] == [False, True]


async def test_a_session_of_another_account_cannot_be_ended(
    browser: Browser, browsers: Browsers, resources: Resources
) -> None:
    await resources.accounts.create("another", password=PASSWORD)
    another, own = await browsers.signed_in("another"), await browsers.signed_in()
    form = (await browser.open("/console/settings")).form("End")
    form.action = form.action.replace(session_of(own), session_of(another))
    assert (await browser.send(form)).status == 404
    assert await is_signed_in(another)


def session_of(browser: Browser) -> str:
    """Return the id of a browser's session."""
    return digest_of(browser.http.cookies["atelier_session"])


@pytest.mark.slow
async def test_a_lost_password_is_replaced_and_every_session_ends(
    browser: Browser, browsers: Browsers, reset: str
) -> None:
    new = browsers.new()
    form = (await new.open(reset)).form("Set password and sign in")
    for bad in ({"new_password": "short", "new_password_again": "short"}, {"new_password": NEW}):
        assert (await new.send(form, **bad)).status == 400
    assert (await new.send(form, new_password=NEW, new_password_again=NEW)).status == 200
    assert await is_signed_in(new)
    assert not await is_signed_in(browser)
    assert (await browsers.new().sign_in("owner", PASSWORD)).status == 403
    assert (await browsers.new().sign_in("owner", NEW)).status == 200


@pytest.mark.slow
async def test_a_password_is_changed_by_who_knows_it(browser: Browser, browsers: Browsers) -> None:
    elsewhere = await browsers.signed_in()
    form = (await browser.open("/console/settings/password")).form("Change password")
    chosen = {"new_password": NEW, "new_password_again": NEW}
    assert (await browser.send(form, form_token="", password=PASSWORD, **chosen)).status == 403
    assert (await browser.send(form, password="not the password", **chosen)).status == 403
    assert (await browser.send(form, password=PASSWORD, new_password=NEW, new_password_again="x")).status == 400
    assert (await browser.send(form, password=PASSWORD, **chosen)).status == 200
    assert await is_signed_in(browser)
    assert not await is_signed_in(elsewhere)
    assert (await browsers.new().sign_in("owner", NEW)).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("told", ["looked for afterwards: none is left", "Something still names the account"])
async def test_an_owner_deletes_the_account_and_is_signed_out(
    service: TestService, member: Member, browser: Browser, browsers: Browsers, told: str
) -> None:
    account, resources = member.account, service.resources
    if told.startswith("Something"):
        await resources.adapter_registry.register(lora_record(accounts=frozenset([account.id])))
    await service.complete(await service.submit(member))
    settings = await browser.open("/console/settings")
    [address] = [link for link in settings.links if link.endswith("/delete-account")]
    page = await browser.open(address)
    form = page.form("Delete the account for good")
    refused = [
        (403, {"name": account.name, "password": PASSWORD, "form_token": "0" * 64}),
        (400, {"name": "another", "password": PASSWORD}),
        (400, {"name": "", "password": PASSWORD}),
        (403, {"name": account.name, "password": "wrong horse battery"}),
    ]
    for status, fields in refused:
        assert (await browser.send(form, **fields)).status == status, fields
    page = await browser.send(form, name=account.name, password=PASSWORD)
    assert told in page.text
    assert "with 1 job and 1 API key" in page.text
    assert "Sign out" not in page.text
    assert not browser.http.cookies
    assert not await is_signed_in(browser)
    assert (await browsers.new().sign_in(account.name, PASSWORD)).status == 403
    [*_, row] = [row for row in await resources.audit.rows(account.id) if row.act is not Act.SIGN_IN_FAILED]
    assert (row.act, row.actor) == (Act.ACCOUNT_DELETED, OWNER)


@pytest.mark.parametrize(
    ("path", "button"),
    [("password", "Change password"), ("delete-account", "Delete the account for good")],
)
async def test_guesses_of_the_current_password_have_to_wait(
    browser: Browser, owner: Account, path: str, button: str
) -> None:
    form = (await browser.open(f"/console/settings/{path}")).form(button)
    statuses = [(await browser.send(form, name=owner.name, password="a wrong guess")).status for _ in range(6)]
    assert statuses == [403] * 5 + [429]
    assert (await browser.send(form, name=owner.name, password=PASSWORD)).answer.headers["retry-after"]
    assert await is_signed_in(browser)
