"""Authentication by the real scripts: what is counted, when keys and windows end, and calls that are sent twice."""

from datetime import timedelta
from typing import Any

import pytest

from serve_app.domain.accounts import Account, Scope
from serve_app.domain.errors import NotFound
from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from serve_app.store.script import Argument, Script
from tests.audit import key_problems
from tests.composition import Resources
from tests.support import end_sooner, existing

A, B = Variant.A, Variant.B
BOTH = frozenset(Variant)
HOUR, HOUR_MS = timedelta(hours=1), 3_600_000
SOON_MS = 20_000


@pytest.fixture
async def acme(resources: Resources) -> Account:
    return await resources.accounts.create("acme")


def now_ms(redis_db: Any) -> float:
    seconds, micros = redis_db.time()
    return seconds * 1000 + micros / 1000


async def test_counted_requests_alone_open_and_fill_a_window_whose_end_stays(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    auth = resources.auth
    _, secret = await resources.api_keys.create(acme.id, interfaces=BOTH)
    counted = redis_key("rate", acme.id, B)
    poll = await auth.authenticate(secret, B, counted=False)
    assert poll.caller is not None
    assert (poll.window.remaining, poll.window.plan.name) == (10, "free")
    assert poll.window.seconds_left == 60, "an unopened window ends a whole window from now"
    assert not redis_db.exists(counted), "a poll opened a window"
    first = await auth.authenticate(secret, B, counted=True)
    assert (first.window.remaining, first.limited) == (9, False)
    assert redis_db.pttl(counted) > 0, "the window has no end"
    ends = end_sooner(redis_db, counted, SOON_MS)
    rest = [await auth.authenticate(secret, B, counted=True) for _ in range(10)]
    assert [each.limited for each in rest] == [False] * 9 + [True]
    assert redis_db.pttl(counted) <= SOON_MS, "a later request moved the window's end"
    poll = await auth.authenticate(secret, B, counted=False)
    assert not poll.limited
    standing = [each.window for each in (*rest, poll)] + [await auth.window(acme.id, B)]
    assert {round(window.resets_at.timestamp() * 1000) for window in standing} == {ends}, "the reset time wavers"
    assert {window.seconds_left for window in standing} <= set(range(1, SOON_MS // 1000 + 1))
    assert (await auth.authenticate(secret, A, counted=True)).window.remaining == 49, "A and B share a count"
    assert key_problems(redis_db) == []


async def test_a_window_is_the_plans_that_the_account_has_now(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    auth = resources.auth
    _, secret = await resources.api_keys.create(acme.id, interfaces=BOTH)
    redis_db.hset(redis_key("account", acme.id), "plan_a", "no such plan")
    assert (await auth.authenticate(secret, A, counted=False)).window.plan.name == "basic"
    assert (await auth.window(acme.id, A)).plan.name == "basic"
    await resources.accounts.set_plans(acme.id, plan_a="enterprise")
    window = (await auth.authenticate(secret, A, counted=False)).window
    assert (window.plan.limit, 3540 < window.seconds_left <= 3600) == (1000, True)


async def test_a_keys_last_use_is_kept_up(resources: Resources, acme: Account, redis_db: Any) -> None:
    key, secret = await resources.api_keys.create(acme.id, interfaces=BOTH)
    assert key.last_used_at is None
    for _ in range(2):
        await resources.auth.authenticate(secret, A, counted=True)
        [shown] = await resources.api_keys.list(acme.id)
        assert existing(shown.last_used_at).year > 1970
        redis_db.hset(redis_key("key", key.id), "used", 1)


async def test_who_is_refused_is_not_counted_nor_called_limited(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    """It is a key of the other interface, of a disabled account, and of one that is not there."""
    _, secret = await resources.api_keys.create(acme.id, interfaces=frozenset({A}))

    async def is_refused(variant: Variant) -> bool:
        auth = await resources.auth.authenticate(secret, variant, counted=True)
        assert not auth.limited
        return auth.caller is None

    assert await is_refused(B)
    await resources.accounts.set_disabled(acme.id, True)
    assert await is_refused(A)
    assert not redis_db.exists(redis_key("rate", acme.id, A))
    await resources.accounts.set_disabled(acme.id, False)
    assert not await is_refused(A)
    redis_db.delete(redis_key("account", acme.id))
    assert await is_refused(A)


async def test_an_expired_and_a_rolled_key_stop_by_the_servers_clock_and_never_later(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    keys, reading = resources.api_keys, frozenset({Scope.READ})
    kept: dict[str, Any] = {"name": "ci", "scopes": reading, "adapters": frozenset({"model_x", "model_y"})}
    made, secret = await keys.create(acme.id, interfaces=frozenset({A}), expires_in=HOUR, **kept)

    async def passes(key: str) -> bool:
        return (await resources.auth.authenticate(key, A, counted=False)).caller is not None

    def ends_in(key_id: str) -> float:
        return (int(redis_db.hget(redis_key("key", key_id), "expires")) - now_ms(redis_db)) / 60_000

    assert 59 < ends_in(made.id) <= 60
    assert await passes(secret)
    successor, next_secret = await keys.roll(made.id, grace=timedelta(minutes=10))
    assert 9 < ends_in(made.id) <= 10, "a rolled key does not end after its grace"
    assert 59 < ends_in(successor.id) <= 60, "a rolled key's successor has another length of life"
    assert (successor.name, successor.interfaces, successor.account_id) == ("ci", {A}, acme.id)
    caller = existing((await resources.auth.authenticate(next_secret, A, counted=True)).caller)
    assert (caller.scopes, caller.may_use("model_y"), caller.may_use("model_")) == (reading, True, False)
    assert await passes(secret), "a rolled key has no grace"
    await keys.roll(made.id, grace=HOUR)
    assert ends_in(made.id) <= 10, "rolling again lengthened a key's life"
    redis_db.hset(redis_key("key", made.id), "expires", int(now_ms(redis_db)) - 1)
    assert not await passes(secret)
    await keys.revoke(successor.id)
    for key_id in (made.id, successor.id, "key_unknown"):
        with pytest.raises(NotFound):
            await keys.roll(key_id, grace=HOUR)
    assert len(await keys.list(acme.id)) == 3


async def test_of_a_keys_own_limit_and_the_accounts_plan_the_smaller_decides(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    keys = resources.api_keys
    made, secret = await keys.create(acme.id, interfaces=frozenset({B}), limit=3)
    _, free = await keys.create(acme.id, interfaces=BOTH)

    async def asked(key: str, variant: Variant = B, *, counted: bool = True) -> tuple[int, int, bool]:
        auth = await resources.auth.authenticate(key, variant, counted=counted)
        return auth.window.plan.limit, auth.window.remaining, auth.limited

    await asked(free)
    end_sooner(redis_db, redis_key("rate", acme.id, B), 50_000)
    assert [await asked(secret) for _ in range(4)] == [(3, 2, False), (3, 1, False), (3, 0, False), (3, 0, True)]
    assert existing((await resources.auth.authenticate(secret, B, counted=False)).caller).plan.limit == 10
    assert 0 < redis_db.pttl(redis_key("rate", acme.id, B, made.id)) <= 50_000, "a key's window ends with the account's"
    left = [(await asked(free))[1] for _ in range(5)]
    assert left == [5, 4, 3, 2, 1], "a key's requests are not the account's"
    await keys.set_limit(made.id, 5)
    assert (await asked(secret))[1] == 0, "the account's plan leaves one, the key two"
    _, successor = await keys.roll(made.id, grace=timedelta())
    assert (await asked(successor, counted=False))[0] == 5
    assert (await resources.auth.authenticate(secret, B, counted=False)).caller is None, "rolled without grace"
    with pytest.raises(NotFound):
        await keys.set_limit(made.id, 1)
    await resources.accounts.set_plans(acme.id, plan_b="basic")
    whole, secret = await keys.create(acme.id, interfaces=BOTH, limit=20)
    await resources.accounts.set_plans(acme.id, plan_b="free")
    assert (await asked(secret, counted=False))[0] == 10, "over its plan"
    await keys.set_limit(whole.id, None)
    assert (await asked(secret, A, counted=False))[0] == 50


async def test_keys_that_are_made_and_rolled_twice_are_made_once(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    """Calls are repeated as redis-py does when a reply was lost."""
    make, roll = (Script(resources.process.redis, f"accounts/{name}_key") for name in ("create", "roll"))
    args: dict[str, Argument] = {
        "key_id": "key_first", "digest": "d1", "hint": "hint", "account": acme.id, "name": "name", "interfaces": "a",
        "life_ms": HOUR_MS, "max_keys": 1, "scopes": "read", "adapters": "", "user": "", "limit": None, "pepper": 1,
    }  # fmt: skip
    assert await make(**args) == (first := await make(**args)), "a repeated call made another record"
    redis_db.hset(redis_key("key", "key_first"), "expires", int(now_ms(redis_db)) + 10 * HOUR_MS)
    assert await make(**args) != first, "a repeated call wrote the record again"
    assert await make(**{**args, "key_id": "key_lost", "account": "acct_nobody", "life_ms": None}) == []
    assert await make(**{**args, "key_id": "key_over"}) == ["full"], "an account has more keys than it may"
    rolled: dict[str, Argument] = {
        "pepper": 1, "old_id": "key_first", "new_id": "key_second", "digest": "d2", "hint": "hint", "grace_ms": 0,
        "max_keys": 1,
    }  # fmt: skip
    second = await roll(**rolled)
    assert await roll(**rolled) == second, "a repeated roll did not find its own successor"
    assert {found.id for found in await resources.api_keys.list(acme.id)} == {"key_first", "key_second"}


async def test_a_request_that_is_sent_twice_counts_once_and_a_forged_digest_is_unknown(
    resources: Resources, acme: Account, redis_db: Any
) -> None:
    key, _ = await resources.api_keys.create(acme.id, interfaces=BOTH)
    authenticate = Script(resources.process.redis, "accounts/authenticate")
    known: dict[str, Argument] = {
        "key_id": key.id, "key_digest": redis_db.hget(redis_key("key", key.id), "digest"), "older_keys": "",
        "interface": "a", "address": "", "plans": ["basic", 2, HOUR_MS],
    }  # fmt: skip
    used: list[Any] = [await authenticate(**known, rate_token=each) for each in ("r1", "r1", "r2", "r2", "r3", "r1")]
    assert [answer[4] for answer in used] == [1, 1, 2, 2, 2, 2]
    assert [answer[0] for answer in used] == ["ok"] * 4 + ["limited", "ok"]
    forged: Any = await authenticate(**{**known, "key_digest": "0" * 64}, rate_token="r4")
    assert forged[0] == "unknown"
