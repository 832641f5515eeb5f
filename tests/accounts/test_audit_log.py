"""The audit log: rows are appended once, kept apart by account, and go by length and age alone."""

import random
import time
from datetime import timedelta
from typing import Any

import pytest

from serve_app.accounts import audit
from serve_app.accounts import audit as audit_log
from serve_app.domain.audit import ANYONE, OWNER, Act, Actor, operator
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from tests.audit import key_problems
from tests.composition import Resources, open_resources

ACCOUNT = "acct_a"


async def test_a_row_says_who_did_what_to_which_when_and_from_where(resources: Resources) -> None:
    await resources.audit.record(ACCOUNT, Act.KEY_REVOKED, Actor(OWNER, "192.0.2.7"), "key_1")
    await resources.audit.record("acct_b", Act.ACCOUNT_CREATED, Actor(operator("root")))
    [row] = await resources.audit.rows(ACCOUNT)
    assert (row.actor, row.act, row.subject, row.address) == ("owner", Act.KEY_REVOKED, "key_1", "192.0.2.7")
    assert row.time.tzinfo is not None
    assert row.log == resources.audit.pseudonym(ACCOUNT) != resources.audit.pseudonym("acct_b")
    assert {each.actor for each in await resources.audit.rows()} == {"owner", "operator:root"}


async def test_nothing_in_redis_tells_the_account_from_its_log(resources: Resources, redis_db: Any) -> None:
    account_id = (await resources.accounts.create("acme")).id
    await resources.audit.record(account_id, Act.SIGNED_IN, Actor(OWNER))
    await resources.audit.record(account_id, Act.SIGN_IN_FAILED, Actor(ANYONE))
    names = [str(name) for name in redis_db.scan_iter() if ":audit" in str(name)]
    assert len(names) == 3
    assert not [name for name in names if account_id in name]
    assert key_problems(redis_db) == []


async def test_a_call_that_is_sent_twice_appends_one_row(resources: Resources) -> None:
    for _ in range(2):
        await resources.audit.record(ACCOUNT, Act.PASSWORD_SET, Actor(OWNER), entry="the same")
    assert len(await resources.audit.rows(ACCOUNT)) == 1
    await resources.audit.record(ACCOUNT, Act.PASSWORD_SET, Actor(OWNER))
    assert len(await resources.audit.rows(ACCOUNT)) == 2


async def test_rows_go_by_length_the_oldest_first(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "MAX_ROWS", 5)
    for number in range(8):
        await resources.audit.record(ACCOUNT, Act.KEY_CREATED, Actor(OWNER), f"key_{number}")
    assert [row.subject for row in await resources.audit.rows(ACCOUNT)] == [f"key_{number}" for number in range(3, 8)]


async def test_a_failed_sign_in_of_no_account_is_not_recorded(resources: Resources, redis_db: Any) -> None:
    await resources.audit.record("acct_none", Act.SIGN_IN_FAILED, Actor(ANYONE))
    assert [name for name in redis_db.scan_iter() if ":audit" in str(name)] == []


async def test_who_cannot_sign_in_pushes_nothing_out(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "MAX_ROWS", 2)
    monkeypatch.setattr(audit_log, "MAX_FAILED_SIGN_INS", 3)
    account_id = (await resources.accounts.create("acme")).id
    await resources.audit.record(account_id, Act.KEY_CREATED, Actor(OWNER))
    for _ in range(9):
        await resources.audit.record(account_id, Act.SIGN_IN_FAILED, Actor(ANYONE))
    acts = [row.act for row in await resources.audit.rows(account_id)]
    assert acts == [Act.KEY_CREATED, *[Act.SIGN_IN_FAILED] * 3]


async def test_rows_go_by_age(settings: Settings, resources: Resources, redis_db: Any) -> None:
    log = redis_key("audit", resources.audit.pseudonym(ACCOUNT))
    row = {"entry": "old", "actor": OWNER, "action": "signed_in", "subject": "", "address": ""}
    redis_db.xadd(log, row, id="1000-0")  # in 1970
    assert await resources.audit.rows(ACCOUNT) == []
    await resources.audit.record(ACCOUNT, Act.SIGNED_OUT, Actor(OWNER))
    assert redis_db.xlen(log) == 1
    life_ms = settings.audit_life.total_seconds() * 1000
    assert 0.9 * life_ms < redis_db.pttl(log) <= life_ms
    async with open_resources(settings.model_copy(update={"audit_life": timedelta(milliseconds=1)})) as forgetful:
        await forgetful.audit.record("acct_b", Act.SIGNED_IN, Actor(OWNER))
        assert log.removeprefix(redis_key("audit", "")) not in redis_db.zrange(redis_key("audit_logs"), 0, -1)


async def test_a_row_of_a_newer_version_is_listed_under_its_own_word(resources: Resources, redis_db: Any) -> None:
    await resources.audit.record(ACCOUNT, Act.SIGNED_IN, Actor(OWNER))
    log = redis_key("audit", resources.audit.pseudonym(ACCOUNT))
    row = {"entry": "x", "actor": OWNER, "action": "key_limited", "subject": "", "address": "", "reason": "new"}
    redis_db.xadd(log, row)
    assert [row.act for row in await resources.audit.rows(ACCOUNT)] == [Act.SIGNED_IN, "key_limited"]


@pytest.mark.parametrize("at_once", [audit.LOGS_AT_ONCE, 2, 1])
async def test_rows_of_many_logs_are_listed_newest_first(
    resources: Resources, redis_db: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LOGS_AT_ONCE", at_once)
    accounts = [f"acct_{number}" for number in range(5)]
    for account_id in accounts:
        await resources.audit.record(account_id, Act.SIGNED_IN, Actor(OWNER))
    chance, later_ms = random.Random(1), int(time.time() * 1000) + 60_000
    for number in range(40):
        log = redis_key("audit", resources.audit.pseudonym(chance.choice(accounts)))
        row = {"entry": f"{number}", "actor": OWNER, "action": "key_created", "subject": f"{number}", "address": ""}
        redis_db.xadd(log, row, id=f"{later_ms + number}-0")
    found = await resources.audit.page(limit=40)
    assert [row.subject for row in found.rows] == [f"{number}" for number in reversed(range(40))]
    pages, place = list[str](), ""
    for _ in range(4):
        page = await resources.audit.page(limit=10, before=place)
        pages, place = pages + [row.subject for row in page.rows], page.next
    assert pages == [f"{number}" for number in reversed(range(40))]
    rare = await resources.audit.page(act=Act.SIGNED_IN, limit=5)
    assert len(rare.rows) == 5
