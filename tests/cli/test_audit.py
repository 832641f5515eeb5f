"""`atelier audit`: every act of the command line leaves one row, and no row holds a secret."""

import getpass
import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.made_jobs import accept, fail_all
from tests.support import PRIVATE_ADAPTER

pytestmark = pytest.mark.slow

PASSWORD = "correct horse battery"
PROMPT = "a boat on a lake of glass"


def test_every_act_of_the_command_line_leaves_exactly_one_row(atelier: Atelier) -> None:
    account = atelier.json("accounts", "create", "acme", "--no-key")
    key = atelier.json("keys", "create", "acme", "--name", "ci")
    new = atelier.json("keys", "roll", key["id"])
    atelier("keys", "revoke", new["id"])
    atelier("loras", "grant", PRIVATE_ADAPTER, "acme")
    atelier("loras", "revoke", PRIVATE_ADAPTER, "acme")
    atelier("accounts", "set-plan", "acme", "--plan-b", "premium")
    atelier("accounts", "set-password", "acme", "--password-stdin", typed=f"{PASSWORD}\n")
    atelier("accounts", "disable", "acme")
    atelier("accounts", "enable", "acme")
    requeued, canceled = _job(atelier, account["id"], fails=True), _job(atelier, account["id"], fails=False)
    atelier("jobs", "cancel", canceled)
    atelier("jobs", "requeue", requeued)
    rows = atelier.json("audit", "--account", "acme")["rows"]
    assert [(row["act"], row["subject"]) for row in rows] == [
        ("account_created", ""),
        ("key_created", key["id"]),
        ("key_rolled", f"{key['id']} {new['id']}"),
        ("key_revoked", new["id"]),
        ("lora_granted", PRIVATE_ADAPTER),
        ("lora_revoked", PRIVATE_ADAPTER),
        ("plans_changed", "a:basic b:premium"),
        ("password_set", ""),
        ("account_disabled", ""),
        ("account_enabled", ""),
        ("job_canceled", canceled),
        ("job_requeued", requeued),
    ]
    assert {row["actor"] for row in rows} == {f"operator:{getpass.getuser()}"}
    assert {row["account"] for row in rows} == {"acme"}
    text = json.dumps(rows) + atelier("audit").out
    for secret in (key["key"], new["key"], PASSWORD, PROMPT):
        assert secret not in text


def test_what_reads_or_fails_leaves_no_row(atelier: Atelier) -> None:
    atelier("accounts", "create", "acme", "--no-key")
    for words in (
        ("accounts", "create", "acme"),
        ("accounts", "list"),
        ("accounts", "set-plan", "acme", "--plan-a", "none"),
        ("keys", "list", "acme"),
        ("keys", "revoke", "key_none"),
        ("keys", "roll", "key_none"),
        ("loras", "grant", "none", "acme"),
        ("jobs", "cancel", "gen_none"),
        ("audit",),
    ):
        atelier(*words)
    assert [row["act"] for row in atelier.json("audit")["rows"]] == ["account_created"]


def test_rows_are_listed_by_account_and_time(atelier: Atelier) -> None:
    for name in ("acme", "zeta"):
        atelier("accounts", "create", name, "--no-key")
    assert {row["account"] for row in atelier.json("audit")["rows"]} == {"acme", "zeta"}
    assert [row["account"] for row in atelier.json("audit", "--account", "zeta")["rows"]] == ["zeta"]
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert atelier.json("audit", "--since", later)["rows"] == []
    for since in ("1h", "7d", "2026-01-01", "2026-01-01T12:00Z"):
        assert len(atelier.json("audit", "--since", since)["rows"]) == 2
    assert "account_created" in atelier("audit").out


def _job(atelier: Atelier, account_id: str, *, fails: bool) -> str:
    async def work(resources: Resources) -> str:
        job_id = await accept(resources, account_id, prompt=PROMPT)
        if fails:
            await fail_all(resources)
        return job_id

    return atelier.stores(work)
