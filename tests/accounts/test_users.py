"""Users of an account and their links: calls that come twice, too late, or for nobody."""

import pytest
import redis

from serve_app.accounts import accounts as users
from serve_app.domain.accounts import Account, Role
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from serve_app.store.script import Script
from tests.composition import Resources

ANN = "ann@example"


@pytest.fixture
async def acme(resources: Resources) -> Account:
    return await resources.accounts.create("acme")


async def test_an_account_has_users_up_to_a_limit(
    resources: Resources, acme: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "MOST", 1)
    with pytest.raises(NotFound):
        await resources.users.create("acct_none", ANN, Role.MEMBER)
    await resources.users.create(acme.id, ANN, Role.MEMBER)
    with pytest.raises(InvalidParameter, match="at most 1 users"):
        await resources.users.create(acme.id, "bob@example", Role.MEMBER)


async def test_an_invitation_whose_reply_was_lost_may_be_repeated(resources: Resources, acme: Account) -> None:
    client = connect(resources.redis_url)
    invite = Script(client, "accounts/create_user")
    user = {"account": acme.id, "user": "user_" + "a" * 26, "name": ANN, "role": "member", "most": 1}
    assert [await invite(**user) for _ in range(2)] == ["ok", "ok"]
    assert len(await resources.users.list(acme.id)) == 1
    await client.aclose()


async def test_who_is_not_there_is_neither_removed_nor_given_a_password(
    resources: Resources, acme: Account, redis_db: redis.Redis
) -> None:
    user_id = "user_" + "a" * 26
    assert not await resources.users.remove(acme.id, user_id)
    with pytest.raises(NotFound):
        await resources.accounts.set_password(acme.id, "correct horse battery", user_id=user_id)
    assert not redis_db.exists(redis_key("user", acme.id, user_id))


async def test_a_removed_user_takes_no_name_along_that_is_another_s_by_now(
    resources: Resources, acme: Account, redis_db: redis.Redis
) -> None:
    user = await resources.users.create(acme.id, ANN, Role.MEMBER)
    redis_db.delete(redis_key("name", ANN))
    other = await resources.accounts.create(ANN)
    assert await resources.users.remove(acme.id, user.id)
    assert await resources.accounts.get(ANN) == other


async def test_a_request_of_an_owner_whose_account_was_disabled_is_not_counted(
    resources: Resources, acme: Account
) -> None:
    assert (await resources.auth.count_owner(acme.id, Variant.A)).caller
    await resources.accounts.set_disabled(acme.id, True)
    assert (await resources.auth.count_owner(acme.id, Variant.A)).caller is None
    assert (await resources.auth.count_owner("acct_none", Variant.A)).caller is None
