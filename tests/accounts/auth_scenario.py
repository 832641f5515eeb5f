"""Checks every promise of authentication on the real scripts."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from serve_app.accounts.accounts import AccountStore
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.auth import Authenticator
from serve_app.domain.accounts import Scope
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.domain.requests import Variant
from serve_app.jobs.polling import Poller
from serve_app.jobs.queue import JobQueue
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from serve_app.store.script import Argument, Script
from tests.audit import key_problems
from tests.made_jobs import new_job
from tests.support import existing, plain_redis

BOTH = frozenset(Variant)
HOUR_MS = 3_600_000
SOON_MS = 20_000
START_MS = 1_800_000_000_000


@dataclass(frozen=True, slots=True)
class Stores:
    accounts: AccountStore
    api_keys: ApiKeyStore
    auth: Authenticator
    poller: Poller
    queue: JobQueue


async def run_auth_scenario(url: str, folder: Path) -> None:
    """Raises `AssertionError` at the first thing that is not as promised."""
    settings = Settings(data_dir=folder, redis_url=url)
    client, sync = connect(url), plain_redis(url)
    sync.flushdb()
    stores = Stores(
        accounts=AccountStore(client, settings),
        api_keys=ApiKeyStore(client, settings),
        auth=Authenticator(client, settings),
        poller=Poller(client, settings),
        queue=JobQueue(client, settings),
    )
    try:
        await _check_counting(stores, sync)
        await _check_denials(stores, sync)
        await _check_polls(stores)
        await _check_expiry(stores, sync)
        await _check_scopes(stores)
        await _check_limits(stores, sync)
        await _check_repeated_creation(
            stores, sync, Script(client, "accounts/create_key"), Script(client, "accounts/roll_key")
        )
        await _check_repeated_requests(stores, sync, Script(client, "accounts/authenticate"))
        assert key_problems(sync) == []
    finally:
        sync.close()
        await client.aclose()


async def _check_counting(stores: Stores, sync: Any) -> None:
    account = await stores.accounts.create("counting")
    api_key, secret = await stores.api_keys.create(account.id, interfaces=BOTH)
    counted = redis_key("rate", account.id, Variant.B)
    poll = await stores.auth.authenticate(secret, Variant.B, counted=False)
    assert poll.caller is not None, "a good key was refused"
    assert (poll.window.remaining, poll.window.plan.name) == (10, "free")
    assert poll.window.seconds_left == 60, "an unopened window ends a whole window from now"
    assert not sync.exists(counted), "a poll opened a window"
    first = await stores.auth.authenticate(secret, Variant.B, counted=True)
    assert (first.window.remaining, first.limited) == (9, False)
    assert sync.pttl(counted) > 0, "the window has no end"
    ends = _end_sooner(sync, counted)
    rest = [await stores.auth.authenticate(secret, Variant.B, counted=True) for _ in range(10)]
    assert [auth.limited for auth in rest] == [False] * 9 + [True]
    assert sync.pttl(counted) <= SOON_MS, "a later request moved the window's end"
    poll = await stores.auth.authenticate(secret, Variant.B, counted=False)
    assert not poll.limited, "a poll was limited"
    standing = [auth.window for auth in (*rest, poll)] + [await stores.auth.window(account.id, Variant.B)]
    assert {round(window.resets_at.timestamp() * 1000) for window in standing} == {ends}, "the reset time wavers"
    assert {window.seconds_left for window in standing} <= set(range(1, SOON_MS // 1000 + 1))
    assert (await stores.auth.authenticate(secret, Variant.A, counted=True)).window.remaining == 49, (
        "A and B share a count"
    )
    (shown,) = await stores.api_keys.list(account.id)
    assert (api_key.last_used_at, shown.last_used_at is None) == (None, False), "its last use is not known"
    sync.hset(redis_key("key", api_key.id), "used", 1)
    await stores.auth.authenticate(secret, Variant.A, counted=True)
    assert int(sync.hget(redis_key("key", api_key.id), "used")) > 1, "its last use is not kept up"
    sync.hset(redis_key("account", account.id), "plan_a", "no such plan")
    assert (await stores.auth.authenticate(secret, Variant.A, counted=False)).window.plan.name == "basic"
    assert (await stores.auth.window(account.id, Variant.A)).plan.name == "basic"
    await stores.accounts.set_plans(account.id, plan_a="enterprise")
    auth = await stores.auth.authenticate(secret, Variant.A, counted=False)
    assert auth.window.plan.limit == 1000, "the account's plan is not its own"
    assert timedelta(minutes=59) < timedelta(seconds=auth.window.seconds_left) <= timedelta(hours=1)


def _end_sooner(sync: Any, counted: str) -> int:
    """Move an open window's end, to tell it from one that a request would open now; return the new end in ms."""
    seconds, micros = sync.time()
    ends = seconds * 1000 + micros // 1000 + SOON_MS
    sync.zadd(counted, dict.fromkeys(sync.zrange(counted, 0, -1), ends))
    sync.pexpireat(counted, ends)
    return ends


async def _check_denials(stores: Stores, sync: Any) -> None:
    account = await stores.accounts.create("denials")
    only_a, secret = await stores.api_keys.create(account.id, interfaces=frozenset({Variant.A}))

    async def passes(variant: Variant = Variant.A) -> bool:
        auth = await stores.auth.authenticate(secret, variant, counted=True)
        assert not auth.limited, "an unknown caller was called limited"
        return auth.caller is not None

    assert not await passes(Variant.B), "a key passed on an interface it is not for"
    await stores.accounts.set_disabled(account.id, True)
    assert not await passes(), "a disabled account passed"
    await stores.accounts.set_disabled(account.id, False)
    assert not sync.exists(redis_key("rate", account.id, Variant.A)), "an unknown caller was counted"
    assert await passes()
    await stores.api_keys.revoke(only_a.id)
    assert not await passes(), "a revoked key passed"
    orphan, secret = await stores.api_keys.create(account.id, interfaces=BOTH)
    sync.delete(redis_key("account", account.id))
    assert not await passes(), "a key without an account passed"
    sync.delete(redis_key("key", orphan.id))
    assert not await passes(), "an unknown key passed"


async def _check_polls(stores: Stores) -> None:
    """A job is there for its account, on the interface that is named if one is, and for nobody else."""
    owner, other = [await stores.accounts.create(f"polling {name}") for name in ("owner", "other")]
    _, secret = await stores.api_keys.create(owner.id, interfaces=BOTH)
    foreign, foreign_secret = await stores.api_keys.create(other.id, interfaces=BOTH)
    asked = new_job(owner.id, job_id="gen_x")
    made = await stores.queue.accept(asked)

    async def seen(key: str, of: Variant | None, job_id: str = made.job.id) -> bool:
        auth, job = await stores.poller.poll(key, Variant.A, job_id, of=of)
        told = (made.job.id, None if of else asked.request, owner.id)
        assert job is None or (job.id, job.request, job.account_id) == told
        assert auth.caller is None or auth.window.remaining == 50, "a poll was counted"
        return job is not None

    assert [await seen(secret, of) for of in (Variant.A, Variant.B, None)] == [True, False, True]
    assert not await seen(secret, None, "gen_y"), "a job that does not exist was shown"
    assert not await seen(secret, None, ""), "a job without a name was shown"
    assert not await seen(foreign_secret, None), "another account's job was shown"
    auth, _ = await stores.poller.poll(foreign_secret, Variant.A, made.job.id, of=None)
    assert auth.caller is not None, "a good key was refused"
    await stores.api_keys.revoke(foreign.id)
    await stores.accounts.set_disabled(owner.id, True)
    for key_that_was in (secret, foreign_secret):
        assert not await seen(key_that_was, None), "a job was shown to nobody"
        auth, _ = await stores.poller.poll(key_that_was, Variant.A, made.job.id, of=None)
        assert auth.caller is None, "a poll passed with a key that does not work any more"


async def _check_expiry(stores: Stores, sync: Any) -> None:
    """Check that an expired key stops, and a rolled one too, by the server's clock and never later."""
    account = await stores.accounts.create("ending")
    hour = timedelta(hours=1)
    made, secret = await stores.api_keys.create(
        account.id, name="ci", interfaces=frozenset({Variant.A}), expires_in=hour
    )

    async def passes(key_that_is: str) -> bool:
        return (await stores.auth.authenticate(key_that_is, Variant.A, counted=False)).caller is not None

    def ends_in(key_id: str) -> float:
        seconds, micros = sync.time()
        return (int(sync.hget(redis_key("key", key_id), "expires")) - seconds * 1000 - micros / 1000) / 60_000

    assert 59 < ends_in(made.id) <= 60, "a key does not end when it was to"
    assert await passes(secret)
    successor, next_secret = await stores.api_keys.roll(made.id, grace=timedelta(minutes=10))
    assert 9 < ends_in(made.id) <= 10, "a rolled key does not end after its grace"
    assert 59 < ends_in(successor.id) <= 60, "a rolled key's successor has another length of life"
    assert (successor.name, successor.interfaces, successor.account_id) == ("ci", {Variant.A}, account.id)
    assert await passes(secret), "a rolled key has no grace"
    assert await passes(next_secret)
    await stores.api_keys.roll(made.id, grace=hour)
    assert ends_in(made.id) <= 10, "rolling again lengthened a key's life"
    seconds, _ = sync.time()
    sync.hset(redis_key("key", made.id), "expires", seconds * 1000)
    assert not await passes(secret), "an expired key passed"
    await stores.api_keys.revoke(successor.id)
    for key_id in (made.id, successor.id, "key_unknown"):
        try:
            await stores.api_keys.roll(key_id, grace=hour)
        except NotFound:
            continue
        raise AssertionError("a key that does not work was rolled")
    assert len(await stores.api_keys.list(account.id)) == 3


async def _check_scopes(stores: Stores) -> None:
    account, reading = await stores.accounts.create("scopes"), frozenset({Scope.READ})
    made, secret = await stores.api_keys.create(
        account.id, interfaces=BOTH, scopes=reading, adapters=frozenset({"model_x", "model_y"})
    )
    _, next_secret = await stores.api_keys.roll(made.id, grace=timedelta(minutes=1))
    for each in (secret, next_secret):
        caller = existing((await stores.auth.authenticate(each, Variant.A, counted=True)).caller)
        assert caller.scopes == reading, "a key may do more than it was made for"
        assert [caller.may_use(lora) for lora in ("model_x", "model_y", "model_")] == [True, True, False], (
            "a key may use more than it was made for"
        )


async def _check_limits(stores: Stores, sync: Any) -> None:
    """A key's own limit and the account's plan count in one script; the smaller one decides."""
    account = await stores.accounts.create("limits")
    made, secret = await stores.api_keys.create(account.id, interfaces=frozenset({Variant.B}), limit=3)
    _, free = await stores.api_keys.create(account.id, interfaces=BOTH)
    await stores.auth.authenticate(free, Variant.B, counted=True)
    asked = [await stores.auth.authenticate(secret, Variant.B, counted=True) for _ in range(4)]
    assert [(auth.window.plan.limit, auth.window.remaining, auth.limited) for auth in asked] == [
        (3, 2, False), (3, 1, False), (3, 0, False), (3, 0, True),
    ], "a key's limit is not kept"  # fmt: skip
    assert asked[0].caller is not None
    assert asked[0].caller.plan.limit == 10, "a key's limit changes the plan"
    of_key = redis_key("rate", account.id, Variant.B, made.id)
    assert 0 < sync.pttl(of_key) <= 60_000, "a key's window has no end"
    others = [await stores.auth.authenticate(free, Variant.B, counted=True) for _ in range(5)]
    assert [auth.window.remaining for auth in others] == [5, 4, 3, 2, 1], "a key's requests are not the account's"
    await stores.api_keys.set_limit(made.id, 5)
    assert (await stores.auth.authenticate(secret, Variant.B, counted=True)).window.remaining == 0, (
        "the account's plan leaves one, the key two"
    )
    _, next_secret = await stores.api_keys.roll(made.id, grace=timedelta())
    assert (await stores.auth.authenticate(next_secret, Variant.B, counted=False)).window.plan.limit == 5
    rolled = await stores.auth.authenticate(secret, Variant.B, counted=False)
    assert rolled.caller is None, "a key that was rolled without grace passed"
    for limit in (0, 11):
        try:
            await stores.api_keys.create(account.id, interfaces=frozenset({Variant.B}), limit=limit)
        except InvalidParameter:
            continue
        raise AssertionError("a key's limit is out of its plan's")
    try:
        await stores.api_keys.set_limit(made.id, 1)
    except NotFound:
        pass
    else:
        raise AssertionError("a key that does not work any more was changed")
    await stores.accounts.set_plans(account.id, plan_b="basic")
    whole, secret = await stores.api_keys.create(account.id, interfaces=BOTH, limit=20)
    await stores.accounts.set_plans(account.id, plan_b="free")
    assert (await stores.auth.authenticate(secret, Variant.B, counted=False)).window.plan.limit == 10, "over its plan"
    await stores.api_keys.set_limit(whole.id, None)
    assert (await stores.auth.authenticate(secret, Variant.A, counted=False)).window.plan.limit == 50


async def _check_repeated_creation(stores: Stores, sync: Any, make: Script, roll: Script) -> None:
    """Repeat calls as redis-py does when a reply was lost."""
    account = await stores.accounts.create("making again")
    args: dict[str, Argument] = {
        "key_id": "key_first",
        "digest": "d1",
        "hint": "hint",
        "account": account.id,
        "name": "name",
        "interfaces": "a",
        "life_ms": HOUR_MS,
        "max_keys": 1,
        "scopes": "read",
        "adapters": "",
        "user": "",
        "limit": None,
        "pepper": 1,
    }
    assert await make(**args) == (first := await make(**args)), "a repeated call made another record"
    sync.hset(redis_key("key", "key_first"), "expires", 10 * START_MS)
    assert await make(**args) != first, "a repeated call wrote the record again"
    assert await make(**{**args, "key_id": "key_lost", "account": "acct_nobody", "life_ms": None}) == []
    roll_args: dict[str, Argument] = {
        "pepper": 1,
        "old_id": "key_first",
        "new_id": "key_second",
        "digest": "d2",
        "hint": "hint",
        "grace_ms": 0,
        "max_keys": 1,
    }
    assert await make(**{**args, "key_id": "key_over"}) == ["full"], "an account has more keys than it may"
    second = await roll(**roll_args)
    assert await roll(**roll_args) == second, "a repeated roll did not find its own successor"
    assert {found.id for found in await stores.api_keys.list(account.id)} == {"key_first", "key_second"}


async def _check_repeated_requests(stores: Stores, sync: Any, auth: Script) -> None:
    """Repeat calls as redis-py does when a reply was lost, and as a forger who knows a key's public id would."""
    account = await stores.accounts.create("asking again")
    api_key, _ = await stores.api_keys.create(account.id, interfaces=BOTH)
    digest = sync.hget(redis_key("key", api_key.id), "digest")

    async def ask(rate_token: str, key_digest: str = digest) -> Any:
        return await auth(
            key_id=api_key.id,
            key_digest=key_digest,
            older_keys="",
            interface="a",
            rate_token=rate_token,
            address="",
            plans=["basic", 2, HOUR_MS],
        )

    used = [await ask(rate_token) for rate_token in ("r1", "r1", "r2", "r2", "r3", "r1")]
    assert [answer[4] for answer in used] == [1, 1, 2, 2, 2, 2]
    assert [answer[0] for answer in used] == ["ok"] * 4 + ["limited", "ok"]
    assert (await ask("r4", "0" * 64))[0] == "unknown", "a forged digest passed"
