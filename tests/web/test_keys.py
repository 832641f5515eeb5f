"""The pages that make keys: shown once, made once, listed, revoked; each for its own interface."""

import asyncio
import re
from datetime import timedelta

import pytest
import redis

from serve_app.domain.accounts import ALL_SCOPES, Account, Scope
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.web.console import keys as pages
from tests.api.app import Member
from tests.composition import Resources, open_resources
from tests.support import adapter_id
from tests.web.browser import Browser, Page
from tests.web.conftest import PASSWORD, Browsers

PAGES = [
    pytest.param("/console/settings/api", "Generate API key", "Authorization: Bearer", "a", id="api"),
    pytest.param("/console/settings/api-keys", "Create new API key", "X-API-Key:", "b", id="api-keys"),
    pytest.param("/console/settings/both", "Create key for both", "Authorization: Bearer", "ab", id="both"),
]
SECRET = re.compile(r"atl_[0-9A-Za-z]{38}")


@pytest.mark.slow
@pytest.mark.parametrize(("path", "button", "header", "interface"), PAGES)
async def test_a_form_makes_one_key_of_its_interface_that_is_shown_once(
    browser: Browser, resources: Resources, owner: Account, path: str, button: str, header: str, interface: str
) -> None:
    page = await browser.open(path)
    for each in interface:
        assert f"/docs/{each}" in page.links
        assert (await browser.open(f"/docs/{each}")).status == 200
    form = page.form(button)
    made = await browser.send(form, key_name="website")
    secret = _secret(made)
    assert f"{header} {secret}" in made.text
    assert made.answer.headers["Cache-Control"] == "no-store"
    assert not made.answer.history, "the key is in the answer to the POST, not behind an address"
    [key] = await resources.api_keys.list(owner.id)
    assert (key.name, key.interfaces) == ("website", set(map(Variant, interface)))
    for variant in Variant:
        auth = await resources.auth.authenticate(secret, variant, counted=False)
        assert (auth.caller is not None) == (variant in interface)
    again = await browser.open(path)
    assert (secret in again.answer.text, f"{secret[:8]}…{secret[-4:]}" in again.text) == (False, True)
    reloaded = await browser.send(form)
    assert (reloaded.status, secret in reloaded.answer.text) == (409, False)
    assert "no second one was created" in reloaded.text
    assert len(await resources.api_keys.list(owner.id)) == 1
    assert _secret(await browser.send(reloaded.form(button))) != secret, "the page that says so has a fresh form"


@pytest.mark.slow
async def test_one_form_sent_many_times_at_once_makes_one_key(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    form = (await browser.open("/console/settings/api")).form("Generate API key")
    answers = await asyncio.gather(*(browser.send(form) for _ in range(8)))
    assert sorted(page.status for page in answers) == [200] + [409] * 7
    assert len(await resources.api_keys.list(owner.id)) == 1


@pytest.mark.slow
async def test_each_page_lists_the_keys_that_work_on_its_interface(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    for name, interfaces in (("only a", "a"), ("only b", "b"), ("both of them", "ab")):
        await resources.api_keys.create(owner.id, name=name, interfaces=frozenset(map(Variant, interfaces)))
    api, api_keys = await browser.open("/console/settings/api"), await browser.open("/console/settings/api-keys")
    assert ["only a" in api.text, "only b" in api.text, "both of them" in api.text] == [True, False, True]
    shown = ["only a" in api_keys.text, "only b" in api_keys.text, "both of them" in api_keys.text]
    assert shown == [False, True, True]


async def test_the_list_says_when_and_from_where_a_key_was_last_used(
    browsers: Browsers, browser: Browser, member: Member
) -> None:
    """It is the address that a trusted proxy vouches for, or the connection's, not the caller's own word."""
    assert "never" in (await browser.open("/console/settings/api")).text
    caller = browsers.new(address="198.51.100.9", headers={**member.a, "X-Forwarded-For": "192.0.2.1"})
    assert (await caller.http.get("/v1/loras")).status_code == 200
    text = (await browser.open("/console/settings/api")).text
    assert "from 198.51.100.9" in text
    assert ("192.0.2.1" in text, "never" in text) == (False, False)


async def test_a_name_is_suggested_by_browser_and_day(browsers: Browsers, resources: Resources, owner: Account) -> None:
    browser = await browsers.signed_in(
        owner.name, headers={"User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"}
    )
    await browser.press("/console/settings/both", "Create key for both")
    [key] = await resources.api_keys.list(owner.id)
    assert key.name == f"Firefox on Linux, {key.created_at:%-d %b}"


async def test_of_keys_that_work_no_more_the_newest_are_listed(
    browser: Browser, resources: Resources, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_ENDED", 1)
    for name in ("old ended", "new ended", "working"):
        key, _ = await resources.api_keys.create(owner.id, name=name, interfaces=frozenset(Variant))
        if name != "working":
            await resources.api_keys.revoke(key.id)
    text = (await browser.open("/console/settings/both")).text
    assert ("working" in text, ("old ended" in text) + ("new ended" in text)) == (True, 1)
    assert "1 older key that no longer works is not shown." in text


@pytest.mark.slow
async def test_the_list_says_when_a_key_expires(browser: Browser, resources: Resources, owner: Account) -> None:
    interfaces = frozenset({Variant.A})
    await resources.api_keys.create(owner.id, name="for ever", interfaces=interfaces)
    passing, _ = await resources.api_keys.create(
        owner.id, name="for a day", interfaces=interfaces, expires_in=timedelta(days=1)
    )
    assert passing.expires_at is not None
    page = await browser.open("/console/settings/api")
    assert f"{passing.expires_at:%-d %b %Y, %H:%M}" in page.text
    assert "expired" not in page.text
    await resources.api_keys.roll(passing.id, grace=timedelta())
    page = await browser.open("/console/settings/api")
    assert "expired" in page.text
    assert len([form for form in page.forms if "Revoke this key" in form.buttons]) == 2, "what is over needs no button"


@pytest.mark.slow
async def test_an_account_with_too_many_keys_gets_no_more_and_learns_why(
    settings: Settings, redis_db: redis.Redis
) -> None:
    async with open_resources(settings.model_copy(update={"max_keys_per_account": 1})) as resources:
        account = await resources.accounts.create("owner", password=PASSWORD)
        browser = Browser(resources.app())
        await browser.sign_in(account.name, PASSWORD)
        made = await browser.press("/console/settings/api", "Generate API key")
        assert made.status == 200
        refused = await browser.send(made.form("Generate API key"))
        assert refused.status == 409
        assert "at most 1 API key active" in refused.text
        assert not refused.tagged("secret")
        page = await browser.send(refused.form("Revoke this key"))
        assert (await browser.send(page.form("Generate API key"))).status == 200
        await browser.aclose()


@pytest.mark.slow
async def test_the_settings_page_shows_plans_what_is_left_and_the_adapters(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    _, secret = await resources.api_keys.create(owner.id, interfaces=frozenset({Variant.A}))
    await resources.auth.authenticate(secret, Variant.A, counted=True)
    text = (await browser.open("/console/settings")).text
    assert "1 of 50 per hour" in text
    assert "0 of 10 per minute" in text
    assert "This account may use 9 LoRA models." in text, "the private adapter of the test catalog, too"


def _secret(page: Page) -> str:
    assert page.status == 200, page.text
    assert page.tagged("secret")
    [secret] = set(SECRET.findall(page.text))
    return secret


@pytest.mark.parametrize(
    ("days", "scopes"), [("30", {Scope.READ}), ("365", {Scope.READ, Scope.GENERATE}), ("", ALL_SCOPES)]
)
async def test_a_key_may_do_what_was_chosen_for_as_long_as_was_chosen(
    browser: Browser, resources: Resources, owner: Account, days: str, scopes: set[Scope]
) -> None:
    form = (await browser.open("/console/settings/api")).form("Generate API key")
    for scope in ALL_SCOPES - scopes:
        del form.fields[f"scope_{scope}"]
    page = await browser.send(form, expires=days)
    assert _secret(page)
    [key] = await resources.api_keys.list(owner.id)
    assert key.scopes == scopes
    life = None if key.expires_at is None else key.expires_at - key.created_at
    assert life == (timedelta(days=int(days)) if days else None)


@pytest.mark.parametrize("change", [{"expires": "7"}, {"no scopes": ""}])
async def test_a_key_for_nothing_or_of_an_odd_length_is_not_made(
    browser: Browser, resources: Resources, owner: Account, change: dict[str, str]
) -> None:
    form = (await browser.open("/console/settings/api")).form("Generate API key")
    if "no scopes" in change:
        form.fields = {name: value for name, value in form.fields.items() if not name.startswith("scope_")}
    page = await browser.send(form, **change)
    assert (page.status, "Choose what the key may do" in page.text) == (400, True)
    assert not await resources.api_keys.list(owner.id)


async def test_a_key_may_be_kept_to_one_lora_by_its_name_or_id(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    neon = adapter_id("neon")
    for given in ("neon", neon):
        page = await browser.press("/console/settings/api", "Generate API key", lora=given)
        assert _secret(page)
        assert neon in page.text, "the curl line names it"
        assert "LoRA Neon" in page.text
    keys = await resources.api_keys.list(owner.id)
    assert [key.adapters for key in keys] == [frozenset({neon})] * 2
    await resources.adapter_grants.revoke(adapter_id("mosaic"), owner.id)
    for given in ("nothing", "Mosaic", adapter_id("mosaic")):
        page = await browser.press("/console/settings/api", "Generate API key", lora=given)
        assert (page.status, "there is no such LoRA" in page.text) == (400, True)
    assert len(await resources.api_keys.list(owner.id)) == 2


@pytest.mark.parametrize(("given", "limit"), [("7", 7), ("", None), ("51", -1), ("0", -1), ("ten", -1)])
async def test_a_key_may_have_a_limit_of_its_own_up_to_the_plans(
    browser: Browser, resources: Resources, owner: Account, given: str, limit: int | None
) -> None:
    page = await browser.press("/console/settings/api", "Generate API key", limit=given)
    if limit == -1:
        assert (page.status, "between 1 and 50" in page.text) == (400, True)
    else:
        [key] = await resources.api_keys.list(owner.id)
        assert key.limit == limit
        assert ("7 requests per hour" in page.text) == (limit is not None)


async def test_a_rolled_key_has_a_successor_and_works_a_day_longer(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    page = await browser.press("/console/settings/api", "Generate API key", key_name="site")
    old = _secret(page)
    form = page.form("Roll this key")
    rolled = await browser.send(form)
    new = _secret(rolled)
    for secret in (old, new):
        assert (await resources.auth.authenticate(secret, Variant.A, counted=False)).caller is not None
    first, second = await resources.api_keys.list(owner.id)
    assert first.expires_at is not None
    assert timedelta() < first.expires_at - second.created_at <= timedelta(days=1)
    assert second.name == "site"
    again = await browser.send(form)
    assert again.status == 409, "a reload makes no third key"
    assert len(await resources.api_keys.list(owner.id)) == 2


@pytest.mark.slow
async def test_a_key_of_another_account_is_not_rolled_or_revoked_nor_any_without_the_forms_token(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    other = await resources.accounts.create("other")
    key, secret = await resources.api_keys.create(other.id, interfaces=frozenset({Variant.A}))
    page = await browser.press("/console/settings/api", "Generate API key")
    for act, button in (("roll", "Roll this key"), ("revoke", "Revoke this key")):
        form = page.form(button)
        assert (await browser.send(form, form_token="x.y")).status == 403
        answers: list[Page] = []
        for key_id in (key.id, "key_unknown"):
            form.action = f"/console/settings/api/{key_id}/{act}"
            answers.append(await browser.send(form))
        assert [answer.status for answer in answers] == [404, 404]
        assert answers[0].text == answers[1].text
    assert [len(await resources.api_keys.list(account)) for account in (owner.id, other.id)] == [1, 1]
    assert (await resources.auth.authenticate(secret, Variant.A, counted=False)).caller is not None
