"""One long story of the gate script, from first request to the window's end; the mutation run tells it again."""

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import redis

from serve_app.domain.errors import NotFound
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.settings import Settings
from serve_app.stores.accounts import AccountStore
from serve_app.stores.jobs import JobStore
from serve_app.stores.redis import Rewrite, Script, connect, key
from tests.audit import key_problems

BOTH = frozenset(Variant)
HOUR_MS = 3_600_000
SOON_MS = 20_000
START_MS = 1_800_000_000_000


async def tell_the_gates_story(url: str, folder: Path, rewrite: Rewrite | None = None) -> None:
    """Raises `AssertionError` at the first thing that is not as promised."""
    settings = Settings(data_dir=folder, redis_url=url)
    client, sync = connect(url), cast(Any, redis.Redis.from_url(url, decode_responses=True))
    sync.flushdb()
    accounts = AccountStore(client, settings, rewrite=rewrite)
    try:
        await _counting(accounts, sync)
        await _turning_away(accounts, sync)
        await _polling(accounts, JobStore(client, settings))
        await _ending(accounts, sync)
        await _making_again(accounts, sync, Script(client, "make_key", rewrite), Script(client, "roll_key", rewrite))
        await _asking_again(accounts, sync, Script(client, "gate", rewrite))
        assert key_problems(sync) == []
    finally:
        sync.close()
        await client.aclose()


async def _counting(accounts: AccountStore, sync: Any) -> None:
    account = await accounts.create_account("counting")
    api_key, secret = await accounts.create_key(account.id, interfaces=BOTH)
    counted = key("counted", account.id, Variant.B)
    poll = await accounts.gate(secret, Variant.B, counted=False)
    assert poll.caller is not None, "a good key was turned away"
    assert (poll.window.remaining, poll.window.plan.name) == (10, "free")
    assert poll.window.seconds_left == 60, "an unopened window ends a whole window from now"
    assert not sync.exists(counted), "a poll opened a window"
    first = await accounts.gate(secret, Variant.B, counted=True)
    assert (first.window.remaining, first.limited) == (9, False)
    assert sync.pttl(counted) > 0, "the window has no end"
    ends = _end_sooner(sync, counted)
    rest = [await accounts.gate(secret, Variant.B, counted=True) for _ in range(10)]
    assert [gate.limited for gate in rest] == [False] * 9 + [True]
    assert sync.pttl(counted) <= SOON_MS, "a later request moved the window's end"
    poll = await accounts.gate(secret, Variant.B, counted=False)
    assert not poll.limited, "a poll was limited"
    standing = [gate.window for gate in (*rest, poll)] + [await accounts.window(account.id, Variant.B)]
    assert {round(window.resets_at.timestamp() * 1000) for window in standing} == {ends}, "the reset time wavers"
    assert {window.seconds_left for window in standing} <= set(range(1, SOON_MS // 1000 + 1))
    assert (await accounts.gate(secret, Variant.A, counted=True)).window.remaining == 49, "A and B share a count"
    (shown,) = await accounts.keys(account.id)
    assert shown.last_used_at is not None, "its last use is not known"
    sync.hset(key("key", api_key.id), "used", 1)
    await accounts.gate(secret, Variant.A, counted=True)
    assert int(sync.hget(key("key", api_key.id), "used")) > 1, "its last use is not kept up"
    sync.hset(key("account", account.id), "plan_a", "no such plan")
    assert (await accounts.gate(secret, Variant.A, counted=False)).window.plan.name == "basic"
    await accounts.set_plans(account.id, plan_a="enterprise")
    gate = await accounts.gate(secret, Variant.A, counted=False)
    assert gate.window.plan.limit == 1000, "the account's plan is not its own"
    assert timedelta(minutes=59) < timedelta(seconds=gate.window.seconds_left) <= timedelta(hours=1)


def _end_sooner(sync: Any, counted: str) -> int:
    """Move an open window's end, to tell it from one that a request would open now; the new end in ms."""
    seconds, micros = sync.time()
    ends = seconds * 1000 + micros // 1000 + SOON_MS
    sync.zadd(counted, dict.fromkeys(sync.zrange(counted, 0, -1), ends))
    sync.pexpireat(counted, ends)
    return ends


async def _turning_away(accounts: AccountStore, sync: Any) -> None:
    account = await accounts.create_account("turning away")
    only_a, secret = await accounts.create_key(account.id, interfaces=frozenset({Variant.A}))

    async def passes(variant: Variant = Variant.A) -> bool:
        gate = await accounts.gate(secret, variant, counted=True)
        assert not gate.limited, "a stranger was told of a limit"
        return gate.caller is not None

    assert not await passes(Variant.B), "a key passed on an interface it is not for"
    await accounts.set_disabled(account.id, True)
    assert not await passes(), "a disabled account passed"
    await accounts.set_disabled(account.id, False)
    assert not sync.exists(key("counted", account.id, Variant.A)), "a stranger was counted"
    assert await passes()
    await accounts.revoke_key(only_a.id)
    assert not await passes(), "a revoked key passed"
    orphan, secret = await accounts.create_key(account.id, interfaces=BOTH)
    sync.delete(key("account", account.id))
    assert not await passes(), "a key without an account passed"
    sync.delete(key("key", orphan.id))
    assert not await passes(), "an unknown key passed"


async def _polling(accounts: AccountStore, jobs: JobStore) -> None:
    """A job is there for its account, on the interface that is named if one is, and for nobody else."""
    owner, stranger = [await accounts.create_account(f"polling {name}") for name in ("owner", "stranger")]
    _, secret = await accounts.create_key(owner.id, interfaces=BOTH)
    foreign, foreign_secret = await accounts.create_key(stranger.id, interfaces=BOTH)
    request = GenerationRequest(prompt="a boat", lora_id="model_x", seeds=(7,))
    made = await jobs.accept(job_id="gen_x", variant=Variant.A, account_id=owner.id, request=request, group="g")

    async def seen(key: str, of: Variant | None, job_id: str = made.job.id) -> bool:
        gate, job = await accounts.poll(key, Variant.A, job_id, of=of)
        assert job is None or (job.id, job.request, job.account_id) == (made.job.id, request, owner.id)
        assert gate.caller is None or gate.window.remaining == 50, "a poll was counted"
        return job is not None

    assert [await seen(secret, of) for of in (Variant.A, Variant.B, None)] == [True, False, True]
    assert not await seen(secret, None, "gen_y"), "a job that does not exist was shown"
    assert not await seen(secret, None, ""), "a job without a name was shown"
    assert not await seen(foreign_secret, None), "another account's job was shown"
    gate, _ = await accounts.poll(foreign_secret, Variant.A, made.job.id, of=None)
    assert gate.caller is not None, "a good key was turned away"
    await accounts.revoke_key(foreign.id)
    await accounts.set_disabled(owner.id, True)
    for key_that_was in (secret, foreign_secret):
        assert not await seen(key_that_was, None), "a job was shown to nobody"
        gate, _ = await accounts.poll(key_that_was, Variant.A, made.job.id, of=None)
        assert gate.caller is None, "a poll passed with a key that does not work any more"


async def _ending(accounts: AccountStore, sync: Any) -> None:
    """A key stops when its time is over, and so does one that was rolled: by the server's clock, and never later."""
    account = await accounts.create_account("ending")
    hour = timedelta(hours=1)
    made, secret = await accounts.create_key(account.id, name="ci", interfaces=frozenset({Variant.A}), expires_in=hour)

    async def passes(key_that_is: str) -> bool:
        return (await accounts.gate(key_that_is, Variant.A, counted=False)).caller is not None

    def ends_in(key_id: str) -> float:
        seconds, micros = sync.time()
        return (int(sync.hget(key("key", key_id), "expires")) - seconds * 1000 - micros / 1000) / 60_000

    assert 59 < ends_in(made.id) <= 60, "a key does not end when it was to"
    assert await passes(secret)
    successor, next_secret = await accounts.roll_key(made.id, grace=timedelta(minutes=10))
    assert 9 < ends_in(made.id) <= 10, "a rolled key does not end after its grace"
    assert 59 < ends_in(successor.id) <= 60, "a rolled key's successor has another length of life"
    assert (successor.name, successor.interfaces, successor.account_id) == ("ci", {Variant.A}, account.id)
    assert await passes(secret), "a rolled key has no grace"
    assert await passes(next_secret)
    await accounts.roll_key(made.id, grace=hour)
    assert ends_in(made.id) <= 10, "rolling again lengthened a key's life"
    seconds, _ = sync.time()
    sync.hset(key("key", made.id), "expires", seconds * 1000)
    assert not await passes(secret), "an expired key passed"
    await accounts.revoke_key(successor.id)
    for key_id in (made.id, successor.id, "key_unknown"):
        try:
            await accounts.roll_key(key_id, grace=hour)
        except NotFound:
            continue
        raise AssertionError("a key that does not work was rolled")
    assert len(await accounts.keys(account.id)) == 3


async def _making_again(accounts: AccountStore, sync: Any, make: Script, roll: Script) -> None:
    """As redis-py does when a reply was lost."""
    account = await accounts.create_account("making again")
    words = ("key_first", "d1", "hint", account.id, "name", "a", HOUR_MS)
    assert await make(*words) == (first := await make(*words)), "a repeated call made another record"
    sync.hset(key("key", "key_first"), "expires", 10 * START_MS)
    assert await make(*words) != first, "a repeated call wrote the record again"
    assert await make("key_lost", "d", "hint", "acct_nobody", "name", "a", "") == []
    rolled = ("key_first", "key_second", "d2", "hint", 0)
    second = await roll(*rolled)
    assert await roll(*rolled) == second, "a repeated roll did not find its own successor"
    assert {found.id for found in await accounts.keys(account.id)} == {"key_first", "key_second"}


async def _asking_again(accounts: AccountStore, sync: Any, gate: Script) -> None:
    """As redis-py does when a reply was lost; and as a forger would who knows a key's public id."""
    account = await accounts.create_account("asking again")
    api_key, _ = await accounts.create_key(account.id, interfaces=BOTH)
    digest = sync.hget(key("key", api_key.id), "digest")
    plan = (1, "basic", 2, HOUR_MS)
    used = [(await gate(api_key.id, digest, "a", receipt, *plan)) for receipt in ("r1", "r1", "r2", "r2", "r3", "r1")]
    assert [answer[4] for answer in used] == [1, 1, 2, 2, 2, 2]
    assert [answer[0] for answer in used] == ["ok"] * 4 + ["limited", "ok"]
    assert (await gate(api_key.id, "0" * 64, "a", "r4", *plan))[0] == "unknown", "a forged digest passed"
