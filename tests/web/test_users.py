"""Several users of an account: invitations, what each role may open, and the end of a user."""

import pytest

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account, Role, User
from serve_app.domain.audit import Act, Actor
from serve_app.domain.errors import InvalidParameter
from serve_app.web.console.navigation import ROLES, may_open
from tests.composition import Resources
from tests.web.browser import Browser
from tests.web.conftest import PASSWORD, Browsers

ANN = "ann@example"
OWN, M, B = Role.OWNER, Role.MEMBER, Role.BILLING
PAGES: dict[str, set[Role]] = {
    "playground": {OWN, M},
    "compare": {OWN, M},
    "history": {OWN, M},
    "loras": {OWN, M},
    "loras/new": {OWN, M},
    "verify": {OWN, M, B},
    "usage": {OWN, M, B},
    "usage.csv": {OWN, M, B},
    "settings": {OWN, M, B},
    "settings/password": {OWN, M, B},
    "settings/api": {OWN, M},
    "settings/api-keys": {OWN, M},
    "settings/both": {OWN, M},
    "settings/users": {OWN},
    "settings/delete-account": {OWN},
}


async def signed_in(browsers: Browsers, resources: Resources, account: Account, user: User | None = None) -> Browser:
    """Return a browser with a session of the user, by default the account's own."""
    browser = browsers.new()
    token = await resources.sessions.create(account.id, user_id=user.id if user else "")
    browser.http.cookies.set("atelier_session", token)
    return browser


@pytest.mark.parametrize("role", Role)
async def test_a_role_opens_its_pages_and_no_others(
    browsers: Browsers, resources: Resources, owner: Account, role: Role
) -> None:
    browser = await signed_in(
        browsers, resources, owner, await resources.users.create(owner.id, f"{role}@example", role)
    )
    for path, roles in PAGES.items():
        page = await browser.open(f"/console/{path}")
        assert page.status == (200 if role in roles else 403), path
    own = await browser.open("/console/settings")
    links = {link.removeprefix("/console/") for link in own.links if link.startswith("/console/")} - {"sign-in"}
    assert all(role in PAGES[link] for link in links), "no link leads where the role may not go"


async def test_what_the_table_does_not_name_is_the_owners_alone() -> None:
    assert [may_open(role, "/billing/new") for role in (OWN, M, B)] == [True, False, False]
    assert {may_open(M, "/settings/users/{user_id}/remove"), may_open(B, "/settings/{slug}/{key_id}/roll")} == {False}
    assert all(OWN in roles for roles in ROLES.values())


async def test_a_form_is_refused_to_a_role_as_its_page_is(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    member = await signed_in(browsers, resources, owner, await resources.users.create(owner.id, ANN, M))
    form = (await (await signed_in(browsers, resources, owner)).open("/console/settings/users")).form("Invite")
    assert (await member.send(form, name="bob@example", role="owner")).status == 403
    assert len(await resources.users.list(owner.id)) == 1


async def test_who_is_invited_chooses_a_password_and_signs_in(
    browser: Browser, browsers: Browsers, resources: Resources, owner: Account
) -> None:
    form = (await browser.open("/console/settings/users")).form("Invite")
    made = await browser.send(form, name=ANN, role="member")
    link = next(word for word in made.text.split() if "/console/links/" in word)
    ann = browsers.new()
    page = await ann.open(link.partition("service.test")[2])
    assert ANN in page.text
    page = await ann.send(
        page.form("Set password and sign in"), new_password=f"x{PASSWORD}", new_password_again=f"x{PASSWORD}"
    )
    assert page.answer.url.path == "/console/playground"
    assert (await ann.open(link.partition("service.test")[2])).status == 404
    assert (await browsers.new().sign_in(ANN, PASSWORD)).status == 403, "the account's own password is not hers"
    assert (await browsers.new().sign_in(ANN, f"x{PASSWORD}")).status == 200
    assert (await browser.open("/console/settings")).status == 200, "nobody else is signed out"
    [user] = await resources.users.list(owner.id)
    rows = [(row.actor, row.act) for row in await resources.audit.rows(owner.id)]
    assert ("owner", Act.USER_INVITED) in rows
    assert {(f"user:{user.id}", Act.PASSWORD_SET), (f"user:{user.id}", Act.SIGNED_IN)} <= set(rows)


async def test_a_removed_user_is_out_and_its_keys_stop(
    browser: Browser, browsers: Browsers, resources: Resources, owner: Account
) -> None:
    user = await resources.users.create(owner.id, ANN, M)
    ann = await signed_in(browsers, resources, owner, user)
    for each in (ann, browser):
        await each.press("/console/settings/api", "Generate API key", key_name="of the test")
    assert len((await ann.open("/console/settings/api")).text.split("of the test")) - 1 == 3, (
        "her own: name, roll, revoke"
    )
    theirs = next(key for key in await resources.api_keys.list(owner.id) if not key.user_id)
    revoke = (await ann.open("/console/settings/api")).form("Revoke this key")
    revoke.action = revoke.action.replace(revoke.action.split("/")[-2], theirs.id)
    assert (await ann.send(revoke)).status == 404
    await browser.press("/console/settings/users", "Remove this user")
    assert (await ann.open("/console/settings")).answer.url.path == "/console/sign-in"
    assert {key.user_id: key.revoked for key in await resources.api_keys.list(owner.id)} == {"": False, user.id: True}
    assert await resources.users.create(owner.id, ANN, B), "the name is free again"


@pytest.mark.parametrize("name", ["ann", "ann@", "a b@c", "a:b@c", "", "x@" + "y" * 100])
async def test_a_name_that_no_user_can_have_is_refused(resources: Resources, owner: Account, name: str) -> None:
    with pytest.raises(InvalidParameter):
        await resources.users.create(owner.id, name, M)


async def test_a_name_belongs_to_one_user_or_account(resources: Resources, owner: Account) -> None:
    await resources.accounts.create("shop@example")
    await resources.users.create(owner.id, ANN, M)
    for name in (ANN, "shop@example"):
        with pytest.raises(InvalidParameter, match="in use"):
            await resources.users.create(owner.id, name, M)
    with pytest.raises(InvalidParameter, match="exists"):
        await resources.accounts.create(ANN)
    assert await resources.accounts.get(ANN) is None, "a user is no account"


async def test_nothing_of_a_user_outlives_the_account(resources: Resources, owner: Account) -> None:
    user = await resources.users.create(owner.id, ANN, M)
    await resources.sessions.create(owner.id, user_id=user.id)
    await resources.sign_in_links.create(owner.id, LinkPurpose.NEW_PASSWORD, user_id=user.id)
    assert (await resources.account_deletion.delete(owner, Actor("test"))).left == []
    assert (await resources.accounts.create(ANN)).name == ANN
