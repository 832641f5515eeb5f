"""`atelier accounts`, `keys` and `loras`."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
import redis
import yaml

from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.support import POCKET, PRIVATE_ADAPTER, adapter_id, add_base_model

PASSWORD = "correct horse battery"


@pytest.mark.slow
def test_an_account_is_created_listed_and_moved_to_other_plans(atelier: Atelier) -> None:
    made = atelier.json("accounts", "create", "acme", "--plan-a", "professional")
    assert made["plans"] == {"a": "professional", "b": "free"}
    atelier("accounts", "create", "zeta")
    assert [account["name"] for account in atelier.json("accounts", "list")["accounts"]] == ["acme", "zeta"]
    moved = atelier.json("accounts", "set-plan", "acme", "--plan-b", "premium")
    assert moved["plans"] == {"a": "professional", "b": "premium"}
    table = atelier("accounts", "list").out.splitlines()
    assert table[0].split()[:2] == ["NAME", "ID"]
    assert made["id"] in table[1]


@pytest.mark.slow
def test_a_plan_that_the_command_does_not_know_is_not_misread(atelier: Atelier, tmp_path: Path) -> None:
    """The service was given `ATELIER_PLANS`, and this shell was not."""
    rows = [{"interface": "a", "name": "huge", "limit": 9000, "window_s": 3600, "loras": 900}]
    plans = tmp_path / "plans.yaml"
    plans.write_text(yaml.safe_dump(rows))
    with_plans = {"ATELIER_PLANS": str(plans)}
    assert atelier("accounts", "create", "acme", "--plan-a", "huge", env=with_plans).code == 0
    words = ("keys", "create", "acme", "--interfaces", "a", "--limit", "8000", "--json")
    key_id = atelier(*words, env=with_plans).facts["id"]
    lora = str(POCKET / "loras" / "outline.safetensors")
    for refused in (
        words,
        ("keys", "edit", key_id, "--limit", "8500"),
        ("loras", "add", lora, "--base", "pocket", "--account", "acme"),
        ("accounts", "set-plan", "acme", "--plan-a", "huge"),
        ("accounts", "create", "zeta", "--plan-a", "huge"),
    ):
        ended = atelier(*refused)
        assert (ended.code, "ATELIER_PLANS" in ended.err) == (2, True), refused
    assert atelier("keys", "edit", key_id, "--limit", "0").code == 0
    assert atelier("accounts", "set-plan", "acme", "--plan-a", "basic").code == 0


def test_a_keys_limit_is_at_most_its_plans_and_can_be_changed(atelier: Atelier) -> None:
    atelier("accounts", "create", "acme")
    made = atelier.json("keys", "create", "acme", "--interfaces", "b", "--limit", "7")
    assert made["limit"] == 7
    assert "7 a window" in atelier("keys", "list", "acme").out
    over = atelier("keys", "edit", made["id"], "--limit", "11")
    assert (over.code, "between 1 and 10" in over.err) == (2, True)
    assert atelier.json("keys", "edit", made["id"], "--limit", "10")["limit"] == 10
    assert atelier.json("keys", "edit", made["id"], "--limit", "0")["limit"] is None


@pytest.mark.slow
def test_a_disabled_accounts_keys_and_sessions_stop_until_it_is_enabled(atelier: Atelier) -> None:
    account = atelier.json("accounts", "create", "acme")
    secret = atelier.json("keys", "create", "acme")["key"]
    session = atelier.stores(lambda resources: resources.sessions.create(account["id"]))
    assert atelier.json("accounts", "disable", "acme")["disabled"] is True
    assert _works_on(atelier, secret) == set()
    assert atelier.stores(lambda resources: resources.sessions.get(session)) is None
    assert atelier.json("accounts", "enable", "acme")["disabled"] is False
    assert _works_on(atelier, secret) == set(Variant)


def test_a_new_account_has_a_key_for_both_interfaces_at_once(atelier: Atelier) -> None:
    made = atelier.json("accounts", "create", "acme")
    assert _works_on(atelier, made["key"]) == set(Variant)
    assert [key["id"] for key in atelier.json("keys", "list", "acme")["keys"]] == [made["key_id"]]
    shown = atelier("accounts", "create", "zeta").out
    secret = shown.split("Authorization: Bearer ")[1].split()[0]
    assert f"X-API-Key: {secret}" in shown
    without = atelier("accounts", "create", "omega", "--no-key").out
    assert "Next: atelier keys create omega" in without
    assert atelier.json("keys", "list", "omega")["keys"] == []


def test_a_key_is_printed_once_works_on_its_interfaces_and_is_still_listed_when_revoked(atelier: Atelier) -> None:
    atelier("accounts", "create", "acme", "--no-key")
    secret = atelier("keys", "create", "acme", "--interfaces", "b", "--name", "ci").out.strip()
    assert _works_on(atelier, secret) == {Variant.B}
    listed, [key] = atelier("keys", "list", "acme").out, atelier.json("keys", "list", "acme")["keys"]
    assert "ci" in listed
    assert secret not in listed + str(key)
    assert atelier("keys", "revoke", key["id"]).code == 0
    assert _works_on(atelier, secret) == set()
    assert [each["revoked"] for each in atelier.json("keys", "list", "acme")["keys"]] == [True]


@pytest.mark.slow
def test_a_key_can_expire(atelier: Atelier, redis_db: redis.Redis) -> None:
    atelier("accounts", "create", "acme", "--no-key")
    made = atelier.json("keys", "create", "acme", "--expires-in", "30d")
    life = datetime.fromisoformat(made["expires_at"]) - datetime.fromisoformat(made["created_at"])
    assert life == timedelta(days=30)
    assert atelier.json("keys", "create", "acme")["expires_at"] is None
    over = atelier.json("keys", "create", "acme", "--expires-in", "1s")
    redis_db.hset(redis_key("key", over["id"]), "expires", 1)
    states = [key["state"] for key in atelier.json("keys", "list", "acme")["keys"]]
    assert states == ["active", "active", "expired"]
    table = atelier("keys", "list", "acme").out
    assert f"{datetime.fromisoformat(made['expires_at']):%Y-%m-%d %H:%M}" in table
    assert "expired" in table


@pytest.mark.slow
def test_a_key_is_rolled_under_its_name(atelier: Atelier) -> None:
    atelier("accounts", "create", "acme")
    old = atelier.json("keys", "create", "acme", "--interfaces", "b", "--name", "ci")
    new = atelier.json("keys", "roll", old["id"], "--grace", "2h")
    assert (new["name"], new["interfaces"], new["replaces"]) == ("ci", ["b"], old["id"])
    assert new["key"] != old["key"]
    listed = {key["id"]: key for key in atelier.json("keys", "list", "acme")["keys"]}
    grace = datetime.fromisoformat(listed[old["id"]]["expires_at"]) - datetime.fromisoformat(new["created_at"])
    assert grace == timedelta(hours=2)
    again = atelier("keys", "roll", new["id"]).out.strip()
    assert _works_on(atelier, again) == {Variant.B}
    few = {"ATELIER_MAX_KEYS_PER_ACCOUNT": "1"}
    refused = atelier("keys", "create", "acme", env=few)
    assert (refused.code, "at most 1 API key active" in refused.err) == (1, True)
    assert atelier("keys", "revoke", new["id"]).code == 0
    assert atelier("keys", "roll", new["id"]).code == 1


@pytest.mark.slow
def test_a_key_is_kept_to_scopes_and_loras(atelier: Atelier) -> None:
    atelier("accounts", "create", "acme")
    made = atelier.json("keys", "create", "acme", "--scope", "read", "--lora", "neon", "--lora", adapter_id("outline"))
    assert (made["scopes"], made["loras"]) == (["read"], sorted([adapter_id("neon"), adapter_id("outline")]))
    assert "read, 2 LoRAs" in atelier("keys", "list", "acme").out
    both = atelier.json("keys", "create", "acme", "--scope", "read", "--scope", "generate")
    assert (both["scopes"], both["loras"]) == (["generate", "read"], None)
    assert atelier("keys", "create", "acme", "--scope", "delete").code == 2
    assert atelier("keys", "create", "acme", "--lora", "no such").code == 1


@pytest.mark.slow
def test_adapters_are_listed_granted_and_revoked(atelier: Atelier) -> None:
    account = atelier.json("accounts", "create", "acme")
    everything = {row["id"]: row for row in atelier.json("loras", "list")["loras"]}
    assert everything[PRIVATE_ADAPTER]["accounts"] == ["owner"]
    assert everything[adapter_id("outline")]["accounts"] is None
    assert PRIVATE_ADAPTER not in _usable(atelier)
    assert atelier.json("loras", "grant", PRIVATE_ADAPTER, "acme")["allowed"] is True
    assert PRIVATE_ADAPTER in _usable(atelier)
    assert atelier.json("loras", "revoke", "private", account["id"])["allowed"] is False, "by name, in any case"
    assert PRIVATE_ADAPTER not in _usable(atelier)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_layer_tables")
def test_an_adapter_is_added_for_an_account_and_removed(atelier: Atelier) -> None:
    file = str(POCKET / "loras" / "outline.safetensors")
    add_base_model(atelier.settings.catalog, "turbo")
    account = atelier.json("accounts", "create", "acme")
    added = atelier.json("loras", "add", file, "--base", "pocket", "--name", "Mine", "--account", "acme")
    assert added["owner"] == account["id"]
    assert added["found"]["rank"] == 8
    assert added["id"] in _usable(atelier)
    for words in (("loras", "show", "mine"), ("loras", "list")):
        shown = atelier(*words).out
        assert ("acme" in shown, account["id"] in shown) == (True, False), words
    assert atelier.json("loras", "show", "mine")["base_models"] == ["pocket", "turbo"]
    assert atelier("loras", "remove", "mine").code == 0
    assert added["id"] not in _usable(atelier)
    refused = atelier("loras", "remove", PRIVATE_ADAPTER)
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "is a row of" in refused.err


def test_a_row_that_is_set_aside_is_listed(atelier: Atelier) -> None:
    content = yaml.safe_load(atelier.settings.catalog.read_text())
    content["adapters"][0]["name"] = ""
    atelier.settings.catalog.write_text(yaml.safe_dump(content))
    assert atelier.json("loras", "list")["set_aside"][0]["id"] == adapter_id("outline")
    assert "Set aside: " in atelier("loras", "list").out


def _works_on(atelier: Atelier, secret: str) -> set[Variant]:
    async def work(resources: Resources) -> set[Variant]:
        found = {each: await resources.auth.authenticate(secret, each, counted=False) for each in Variant}
        return {variant for variant, auth in found.items() if auth.caller is not None}

    return atelier.stores(work)


def _usable(atelier: Atelier) -> set[str]:
    return {row["id"] for row in atelier.json("loras", "list", "--account", "acme")["loras"]}


@pytest.mark.slow
def test_an_account_is_deleted_only_with_a_yes(atelier: Atelier, redis_db: redis.Redis) -> None:
    account = atelier.json("accounts", "create", "acme")
    refused = atelier("accounts", "delete", "acme")
    assert refused.code == 2
    assert "--yes" in refused.err
    deleted = atelier.json("accounts", "delete", "acme", "--yes")
    assert deleted == {"id": account["id"], "name": "acme", "jobs": 0, "keys": 1, "left": []}
    assert atelier.json("accounts", "list")["accounts"] == []
    acts = [row["act"] for row in atelier.json("audit", "--account", account["id"])["rows"]]
    assert acts == ["account_created", "key_created", "account_deleted"]
    offered_to = redis_key("loras_offered", atelier.json("accounts", "create", "zeta")["id"])
    redis_db.zadd(offered_to, {"model_mine": 1})
    reported = atelier("accounts", "delete", "zeta", "--yes")
    assert (reported.code, "Still there: loras_offered:" in reported.out) == (1, True)
