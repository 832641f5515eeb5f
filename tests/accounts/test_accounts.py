"""Accounts and authentication: who may call, how often, and what anonymous callers learn."""

import asyncio
import re
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from serve_app.accounts.sessions import Holder, digest_of
from serve_app.domain.accounts import Account, ApiKey
from serve_app.domain.errors import InvalidParameter, NotFound, TooManyKeys
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from serve_app.store.redis_inspection import keys_by_pepper
from serve_app.store.script import Script
from tests.audit import Reading
from tests.composition import Resources, open_resources

BOTH = frozenset(Variant)


@pytest.fixture
async def acme(resources: Resources) -> Account:
    return await resources.accounts.create("acme")


async def test_a_name_belongs_to_one_account(resources: Resources, acme: Account) -> None:
    with pytest.raises(InvalidParameter, match="acme"):
        await resources.accounts.create(" acme ")
    made = await asyncio.gather(*(resources.accounts.create("rush") for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(one, Account) for one in made) == 1


async def test_a_creation_whose_reply_was_lost_may_be_repeated(resources: Resources) -> None:
    client = connect(resources.redis_url)
    create = Script(client, "accounts/create_account")
    plans = {"plan_a": "basic", "plan_b": "free"}
    for name in ("acme", "acme", "another name"):
        assert await create(account="acct_one", name=name, password_hash="", **plans) == "ok"
    assert [account.name for account in await resources.accounts.list()] == ["acme"]
    assert await create(account="acct_two", name="acme", password_hash="", **plans) == "taken"
    await client.aclose()


async def test_a_key_authenticates_and_its_secret_is_stored_nowhere(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    key, secret = await resources.api_keys.create(acme.id, name="laptop", interfaces=BOTH)
    auth = await resources.auth.authenticate(secret, Variant.A, counted=True)
    assert auth.caller is not None
    assert (auth.caller.account_id, auth.caller.account_name, auth.caller.key_id) == (acme.id, "acme", key.id)
    assert (auth.window.remaining, auth.limited) == (49, False)
    assert 3599 <= auth.window.seconds_left <= 3600
    assert re.fullmatch(r"atl_[0-9A-Za-z]{38}", secret)
    assert secret[4:-4] not in key.hint
    assert _everything(redis_db).find(secret[4:36]) == -1


@pytest.mark.slow
async def test_a_password_opens_and_everything_else_does_not(resources: Resources) -> None:
    account = await resources.accounts.create("ann", password="correct horse battery")
    assert await resources.accounts.check_password("ann", "correct horse battery")
    assert await resources.accounts.check_password("ann", "wrong horse battery") is None
    assert await resources.accounts.check_password("nobody", "correct horse battery") is None
    await resources.accounts.set_password(account.id, "another long password")
    assert await resources.accounts.check_password("ann", "correct horse battery") is None
    assert await resources.accounts.check_password("ann", "another long password")
    await resources.accounts.set_disabled(account.id, True)
    assert await resources.accounts.check_password("ann", "another long password") is None


async def test_an_account_without_a_password_cannot_sign_in(resources: Resources, acme: Account) -> None:
    for guess in ("", "x" * 12):
        assert await resources.accounts.check_password("acme", guess) is None


async def test_an_account_has_no_more_working_keys_than_it_may(settings: Settings, redis_db: Any) -> None:
    """The limit holds for calls at the same time, too; a key that was revoked or has expired does not count."""
    async with open_resources(settings.model_copy(update={"max_keys_per_account": 5})) as resources:
        account, other = [await resources.accounts.create(name) for name in ("many", "other")]

        async def make(account_id: str = account.id) -> ApiKey | None:
            try:
                return (await resources.api_keys.create(account_id, interfaces=BOTH))[0]
            except TooManyKeys:
                return None

        made = [key for key in await asyncio.gather(*(make() for _ in range(40))) if key]
        assert len(made) == len(await resources.api_keys.list(account.id)) == 5
        assert await make(other.id), "another account's keys do not count"
        await resources.api_keys.revoke(made[0].id)
        redis_db.hset(redis_key("key", made[1].id), "expires", 1)
        assert [await make() is not None for _ in range(3)] == [True, True, False]


async def test_rolling_needs_no_free_place_but_cannot_be_repeated_for_more(settings: Settings, redis_db: Any) -> None:
    async with open_resources(settings.model_copy(update={"max_keys_per_account": 2})) as resources:
        account = await resources.accounts.create("rolling")
        keys = [(await resources.api_keys.create(account.id, interfaces=BOTH))[0] for _ in range(2)]
        await resources.api_keys.roll(keys[0].id, grace=timedelta(hours=1))
        for key in keys:
            with pytest.raises(TooManyKeys):
                await resources.api_keys.roll(key.id, grace=timedelta(hours=1))
        with pytest.raises(TooManyKeys):
            await resources.api_keys.create(account.id, interfaces=BOTH)


async def test_only_the_newest_of_the_keys_that_ended_are_listed(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    untyped, kept = redis_db.pipeline(), 500
    for number in range(kept + 3):
        untyped.hset(redis_key("key", f"old_{number}"), mapping={"digest": "d", "revoked": "1"})
        untyped.zadd(redis_key("keys", acme.id), {f"old_{number}": number})
    untyped.execute()
    key, _ = await resources.api_keys.create(acme.id, interfaces=BOTH)
    left = redis_db.zrange(redis_key("keys", acme.id), 0, -1)
    assert left == [*(f"old_{number}" for number in range(3, kept + 3)), key.id]
    assert not redis_db.exists(redis_key("key", "old_0"))


async def test_a_key_needs_an_account_and_an_interface(resources: Resources, acme: Account) -> None:
    with pytest.raises(NotFound):
        await resources.api_keys.create("acct_none", interfaces=BOTH)
    with pytest.raises(InvalidParameter, match="interfaces"):
        await resources.api_keys.create(acme.id, interfaces=frozenset())
    with pytest.raises(InvalidParameter, match="expires_in"):
        await resources.api_keys.create(acme.id, interfaces=BOTH, expires_in=timedelta())
    assert not await resources.api_keys.revoke("key_none")


async def test_a_console_session_opens_lives_and_ends(resources: Resources, acme: Account, redis_db: Any) -> None:
    token = await resources.sessions.create(acme.id)
    assert await resources.sessions.get(token) == Holder(acme.id, "", "0.0")
    assert await resources.sessions.get("guess") is None
    assert token not in _everything(redis_db)
    assert await resources.sessions.end(acme.id, digest_of(token))
    assert await resources.sessions.get(token) is None


async def test_what_was_begun_with_the_old_password_opens_no_session(resources: Resources) -> None:
    """The password of the sign-in was right a moment before it was changed."""
    ann = await resources.accounts.create("ann", password="correct horse battery")
    begun = await resources.accounts.check_password("ann", "correct horse battery")
    assert begun
    opened = await resources.sessions.create(ann.id, credential_version=begun.credential_version)
    credential_version = await resources.accounts.set_password(ann.id, "another long password")
    late = await resources.sessions.create(ann.id, credential_version=begun.credential_version)
    new = await resources.sessions.create(ann.id, credential_version=credential_version)
    assert [await resources.sessions.get(token) for token in (opened, late, new)] == [
        None,
        None,
        Holder(ann.id, "", credential_version),
    ]
    assert len(await resources.sessions.list(ann.id)) == 1


async def test_a_session_ends_when_idle_and_never_outlives_twelve_hours(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    token = await resources.sessions.create(acme.id)
    (name,) = redis_db.scan_iter("*:session:*")
    assert 1790 <= redis_db.ttl(name) <= 1800
    redis_db.expire(name, 10)
    await resources.sessions.get(token)
    assert redis_db.ttl(name) >= 1790  # it was used, so the half hour starts again
    seconds, _ = redis_db.time()
    redis_db.hset(name, "ends", (seconds + 60) * 1000)
    await resources.sessions.get(token)
    assert redis_db.ttl(name) <= 60  # the half hour does not go beyond its end
    redis_db.hset(name, "ends", (seconds - 1) * 1000)
    assert await resources.sessions.get(token) is None


def _everything(client: Any) -> str:
    """Return every name and value in Redis as one text."""
    return str(vars(Reading(client)))


async def test_keys_of_an_older_pepper_work_beside_new_ones_until_it_is_no_longer_listed(
    settings: Settings, redis_db: Any
) -> None:
    async def who(at: Settings, secret: str, job_id: str = "gen_none") -> str:
        async with open_resources(at) as opened:
            caller = (await opened.auth.authenticate(secret, Variant.A, counted=True)).caller
            polled = (await opened.poller.poll(secret, Variant.A, job_id, of=None)).auth.caller
            assert (caller and caller.key_id) == (polled and polled.key_id)
            return caller.key_id if caller else ""

    first = settings.model_copy(update={"pepper": SecretStr("one")})
    both = settings.model_copy(update={"peppers": {2: SecretStr("two"), 1: SecretStr("one")}})
    second = settings.model_copy(update={"peppers": {2: SecretStr("two")}})
    third = settings.model_copy(update={"peppers": {3: SecretStr("three"), 2: SecretStr("two")}})
    async with open_resources(first) as opened:
        account = await opened.accounts.create("acme")
        old, old_secret = await opened.api_keys.create(account.id, interfaces=BOTH)
        folder, log = opened.images.account_folder(account.id), opened.audit.pseudonym(account.id)
    async with open_resources(both) as opened:
        new, new_secret = await opened.api_keys.create(account.id, interfaces=BOTH)
        assert (opened.images.account_folder(account.id), opened.audit.pseudonym(account.id)) == (folder, log)
    assert [await who(both, secret) for secret in (old_secret, new_secret)] == [old.id, new.id]
    assert [await who(second, secret) for secret in (old_secret, new_secret)] == ["", new.id]
    assert [await who(first, secret) for secret in (old_secret, new_secret)] == [old.id, ""]
    assert [await who(third, secret) for secret in (old_secret, new_secret)] == ["", new.id]
    assert keys_by_pepper(settings.redis_url) == {1: 1, 2: 1}
    assert redis_db.hget(redis_key("key", old.id), "used")
    async with open_resources(both) as opened:
        _, rolled = await opened.api_keys.roll(old.id, grace=timedelta())
    assert await who(second, rolled)
    assert keys_by_pepper(settings.redis_url) == {2: 2}
