"""After an account's deletion only its audit log names it, and no other account has changed."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account, Role
from serve_app.domain.audit import OWNER, Act, Actor
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import HeartbeatReply
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.operations.account_deletion import CUT_SHORT_AFTER
from serve_app.operations.housekeeping import reap_forever
from serve_app.store import redis_client as stores_redis
from serve_app.store.keys import redis_key
from serve_app.store.script import Script, load_script
from serve_app.webhooks.endpoints import OF_JOBS
from serve_app.webhooks.targets import Targets
from tests.audit import audit
from tests.composition import Resources, open_resources
from tests.faults.redis_proxy import proxy_to
from tests.made_jobs import accept, claim, complete, fail_all, put
from tests.support import PRIVATE_ADAPTER, lora_record, wait_until

MILLISECOND, DAY = timedelta(milliseconds=1), timedelta(days=1)
PROMPT = "a boat of nobody else"


async def _populate(resources: Resources, name: str) -> Account:
    """An account with a key, a user, a session on no list, a link, a grant, a completed job, an object of no record."""
    account = await resources.accounts.create(name, password="correct horse battery")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    assert (await resources.auth.authenticate(secret, Variant.A, counted=True)).caller
    await resources.sessions.create(account.id)
    await resources.process.redis.delete(redis_key("sessions", account.id))
    await resources.users.create(account.id, f"ann@{name}", Role.MEMBER)
    await resources.sign_in_links.create(account.id, LinkPurpose.SIGN_IN)
    await resources.adapter_grants.grant(PRIVATE_ADAPTER, account.id)
    await resources.sign_ins.count(name, "192.0.2.7", None)
    await resources.audit.record(account.id, Act.SIGNED_IN, Actor(OWNER))
    await complete(resources, account.id, prompt=PROMPT)
    await put(resources, "gen_lost", account_id=account.id, attempt=3, when=datetime.now(UTC))
    return account


def _files(resources: Resources, account: Account) -> dict[Path, bytes]:
    folder = resources.settings.data_dir / "images" / resources.images.account_folder(account.id)
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _rows(server: Any, account: Account) -> dict[str, bytes]:
    """Every key that names the account, with its value as Redis stores it."""
    values = {name.decode(): server.dump(name) for name in server.scan_iter()}
    return {name: value for name, value in values.items() if account.id in name or account.id.encode() in value}


def _left(server: Any, account: Account) -> dict[str, bytes]:
    """What names a deleted account and does not go within a day by itself, as the kinds that are on no list do."""
    passing = ("sign_in", "sign_in_link", "session", "idempotency", "shared_waiters")
    rows = _rows(server, account)
    for name in [name for name in rows if name.startswith(tuple(redis_key(family, "") for family in passing))]:
        assert 0 < server.pttl(name) <= DAY // MILLISECOND, name
        del rows[name]
    return rows


@pytest.fixture
def raw(redis_url: str, redis_db: redis.Redis) -> Iterator[Any]:
    """A client for bytes, by which values are dumped as they are, without compression."""
    with redis.Redis.from_url(redis_url) as client:
        untyped = cast(Any, client)
        untyped.config_set("rdbcompression", "no")
        yield untyped
        untyped.config_set("rdbcompression", "yes")


@pytest.mark.slow
async def test_nothing_names_a_deleted_account_and_another_is_untouched(
    resources: Resources, redis_db: redis.Redis, raw: Any
) -> None:
    other, account = await _populate(resources, "zeta"), await _populate(resources, "acme")
    resources.webhooks.targets = Targets([ip_network("192.0.2.0/24")])
    await resources.webhooks.create(account.id, "https://192.0.2.7/hook")
    ended = await accept(resources, account.id, webhook="https://192.0.2.7/own")
    await resources.queue.cancel(ended, account_id=account.id)
    settle = Script(resources.process.redis, "webhooks/settle_delivery")
    delivery = {"account": account.id, "endpoint": OF_JOBS, "message": f"msg_{ended}_1"}
    assert await settle(**delivery, outcome="failed", status="", error="", pause_ms=0, kept=1) == "failed"
    assert len([name for name in _rows(raw, account) if "webhook" in name]) == 7
    shared = (redis_key("accounts"), redis_key("granted", PRIVATE_ADAPTER), redis_key("idle_vtime", "generation"))

    def of_other() -> dict[str, bytes]:
        return {name: value for name, value in _rows(raw, other).items() if name not in shared}

    rows, files = of_other(), _files(resources, other)
    assert len(rows) > 8
    assert files
    assert _files(resources, account)
    assert len(await resources.account_records.left(account.id)) > 8
    deleted = await resources.account_deletion.delete(account, Actor("operator:tests"))
    assert (deleted.jobs, deleted.keys, deleted.left) == (2, 1, [])
    assert _left(raw, account) == {}
    [kept] = await resources.job_history.list(other.id)
    assert isinstance(kept.request, GenerationRequest)
    assert kept.request.prompt == PROMPT
    assert not (resources.settings.data_dir / "images" / resources.images.account_folder(account.id)).exists()
    assert await resources.accounts.get("acme") is None
    assert of_other() == rows
    assert _files(resources, other) == files
    assert await resources.accounts.get("zeta")
    assert await _acts(resources, account) == [Act.SIGNED_IN, Act.ACCOUNT_DELETED]
    assert audit(redis_db, max_attempts=5) == []
    await resources.account_records.begin_removal(account.id, "acme", actor="operator:tests", address="")
    assert not raw.exists(redis_key("account", account.id)), "a repeated call brings nothing back"
    await resources.adapter_registry.register(lora_record(accounts=frozenset([account.id])))
    again = await resources.account_deletion.delete(account, Actor("operator:tests"))
    assert (again.jobs, again.keys, again.left) == (0, 0, [f"loras_offered:{account.id}"])
    assert (await resources.accounts.create("acme")).id != account.id, "the name is free again"


async def test_its_unfinished_jobs_end_at_once(resources: Resources, redis_db: redis.Redis) -> None:
    account = await resources.accounts.create("acme")
    queued_again = await accept(resources, account.id)
    await fail_all(resources)
    redis_db.delete(redis_key("jobs", account.id))  # as where nothing was accepted since, for as long as records live
    assert await resources.dead_letters.requeue(queued_again)
    (claimed,) = await claim(resources)
    await accept(resources, account.id)
    deleted = await resources.account_deletion.delete(account, Actor("operator:tests"))
    assert (deleted.jobs, deleted.left) == (2, [])
    assert await resources.queue.heartbeat(claimed.lease, progress=50) is HeartbeatReply.FENCED
    assert await claim(resources) == []
    assert audit(redis_db, max_attempts=5) == []


@pytest.mark.parametrize(
    ("cut_at", "is_recorded", "is_gone"),
    [("SREM", False, False), ("EXISTS", False, False), ("remove_account", True, False), ("HDEL", True, True)],
)
async def test_a_deletion_that_was_cut_short_is_finished_by_the_housekeeper(
    resources: Resources,
    raw: Any,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    cut_at: str,
    is_recorded: bool,
    is_gone: bool,
) -> None:
    account = await _populate(resources, "acme")
    monkeypatch.setattr(stores_redis, "RETRIES", 0)
    async with proxy_to(redis_url) as proxy:
        settings = resources.settings.model_copy(update={"redis_url": proxy.url})
        async with open_resources(settings) as losing_redis:
            word = _script_digest(raw, f"operations/{cut_at}") if cut_at == "remove_account" else cut_at
            proxy.refuse_from(f"\r\n{word}\r\n")  # a script that Redis has not seen yet is sent whole, with its words
            with pytest.raises(StoreUnavailable):
                await losing_redis.account_deletion.delete(account, Actor("operator:tests"))
            proxy.heal()
    assert (await _acts(resources, account) == [Act.SIGNED_IN, Act.ACCOUNT_DELETED]) == is_recorded
    found = await resources.accounts.get("acme")
    assert (found is None) == is_gone
    assert found is None or found.disabled
    successor = await resources.accounts.create("acme") if found is None else None
    assert await resources.account_deletion.finish_removals() == 0, "it may be under way"
    _begin_earlier(raw, account, by=CUT_SHORT_AFTER)
    housekeeper = asyncio.create_task(reap_forever(resources.for_housekeeping, remove_every=timedelta(milliseconds=20)))
    await wait_until(lambda: not raw.exists(redis_key("accounts_removing")))
    housekeeper.cancel()
    with suppress(asyncio.CancelledError):
        await housekeeper
    assert _left(raw, account) == {}
    assert not (resources.settings.data_dir / "images" / resources.images.account_folder(account.id)).exists()
    assert await resources.accounts.get("acme") == successor, "the name's next holder keeps it"
    rows = [(row.act, row.actor) for row in await resources.audit.rows(account.id)]
    assert rows == [(Act.SIGNED_IN, OWNER), (Act.ACCOUNT_DELETED, "operator:tests")]
    assert await resources.account_deletion.finish_removals() == 0


async def _acts(resources: Resources, account: Account) -> list[Act | str]:
    return [row.act for row in await resources.audit.rows(account.id)]


def _script_digest(server: Any, name: str) -> str:
    """Return the digest by which the server knows a script."""
    return str(server.script_load(load_script(name).text))


def _begin_earlier(server: Any, account: Account, *, by: timedelta) -> None:
    """Move the beginning of the account's deletion back in its record."""
    *facts, began_ms = json.loads(server.hget(redis_key("accounts_removing"), account.id))
    server.hset(redis_key("accounts_removing"), account.id, json.dumps([*facts, began_ms - by // MILLISECOND]))


async def test_a_deletion_reads_its_own_alone(resources: Resources, redis_db: redis.Redis) -> None:
    """However many jobs other accounts have, Redis is called equally often, and never for a scan."""
    calls: list[int] = []
    for others in (0, 1, 30):  # Redis may see the scripts for the first time
        for number in range(others):
            await complete(resources, f"acct_{others}_{number}")
        account = await resources.accounts.create(f"acme{others}")
        cast(Any, redis_db).config_resetstat()
        await resources.account_deletion.delete(account, Actor("operator:tests"))
        told: dict[str, dict[str, int]] = cast(Any, redis_db).info("commandstats")
        assert "cmdstat_scan" not in told
        calls.append(
            sum(each["calls"] for name, each in told.items() if name not in ("cmdstat_info", "cmdstat_config"))
        )
    assert calls[1] == calls[2] < 700
