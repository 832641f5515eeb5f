"""What happens in the console leaves one row each in the audit log."""

import pytest

from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act
from tests.composition import Resources
from tests.support import wait_until
from tests.web.conftest import PASSWORD, Browsers

ADDRESS = "203.0.113.99"


@pytest.mark.slow
async def test_every_act_in_the_console_leaves_exactly_one_row(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    browser = browsers.new(address=ADDRESS)
    await browser.sign_in("owner", "not the password")
    await wait_until(lambda: _count(resources, owner, 1))
    await browser.sign_in("owner", PASSWORD)
    page = await browser.open("/console/settings/api")
    page = await browser.send(page.form("Generate API key"), key_name="website")
    [key] = await resources.api_keys.list(owner.id)
    page = await browser.open("/console/settings/api")
    await browser.send(page.form("Revoke this key"))
    page = await browser.open("/console/settings/password")
    await browser.send(
        page.form("Change password"), password="wrong", new_password="n" * 12, new_password_again="n" * 12
    )
    page = await browser.open("/console/settings")
    await browser.send(page.form("Sign out"))
    rows = await resources.audit.rows(owner.id)
    assert [(row.actor, row.act, row.subject) for row in rows] == [
        ("anyone", Act.SIGN_IN_FAILED, ""),
        ("owner", Act.SIGNED_IN, ""),
        ("owner", Act.KEY_CREATED, key.id),
        ("owner", Act.KEY_REVOKED, key.id),
        ("owner", Act.SIGN_IN_FAILED, ""),
        ("owner", Act.SIGNED_OUT, ""),
    ]
    assert {row.address for row in rows} == {ADDRESS}


@pytest.mark.slow
async def test_signing_out_everywhere_is_a_row_of_its_own(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    browser = browsers.new()
    await browser.sign_in("owner", PASSWORD)
    page = await browser.open("/console/settings")
    await browser.send(page.form("Sign out everywhere"), everywhere="1")
    acts = [row.act for row in await resources.audit.rows(owner.id)]
    assert acts == [Act.SIGNED_IN, Act.SIGNED_OUT_EVERYWHERE]


@pytest.mark.slow
async def test_a_name_that_no_account_has_is_not_recorded(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    """What is typed there may be a password."""
    await browsers.new().sign_in(PASSWORD, PASSWORD)
    await browsers.new().sign_in("owner", "wrong")
    await wait_until(lambda: _count(resources, owner, 1))
    assert len(await resources.audit.rows()) == 1


async def _count(resources: Resources, owner: Account, number: int) -> bool:
    return len(await resources.audit.rows(owner.id)) == number
