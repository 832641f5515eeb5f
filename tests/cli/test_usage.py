"""`atelier usage`: what accounts used, as a table, JSON and CSV."""

import csv
from io import StringIO

import pytest

from serve_app.domain.requests import Variant
from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.made_jobs import complete
from tests.support import adapter_id

NAME = "=HYPERLINK(evil)"


async def _used(resources: Resources) -> None:
    """Draw for two accounts: with a key in two jobs, and in the console for one whose name is a formula."""
    outline = {"lora_id": adapter_id("outline")}
    acme, formula = await resources.accounts.create("acme"), await resources.accounts.create(NAME)
    key, _ = await resources.api_keys.create(acme.id, interfaces=frozenset(Variant), name="laptop")
    await complete(resources, acme.id, seeds=(1,), key_id=key.id, **outline)
    await complete(resources, acme.id, seeds=(1, 2), key_id=key.id, **outline)
    await complete(resources, formula.id, seeds=(1, 2, 3), **outline)


@pytest.mark.slow
def test_usage_is_shown_by_account_day_key_and_lora(atelier: Atelier) -> None:
    atelier.stores(_used)
    rows = atelier.json("usage")["usage"]
    found = {row["account"]: row for row in rows}
    assert len(rows) == 2
    assert found["acme"]["images"] == 3
    assert found["acme"] | {"key": "laptop", "lora": "Outline", "worker_seconds": 2.0} == found["acme"]
    assert (found[NAME]["key"], found[NAME]["key_id"], found[NAME]["images"]) == ("console", "", 3)
    assert [row["account"] for row in atelier.json("usage", "--account", "acme")["usage"]] == ["acme"]
    table = atelier("usage").out
    assert "laptop" in table
    assert "Outline" in table
    in_csv = list(csv.DictReader(StringIO(atelier("usage", "--csv").out)))
    assert {row["account"].removeprefix("'"): int(row["images"]) for row in in_csv} == {"acme": 3, NAME: 3}
    assert in_csv[0].keys() == rows[0].keys()
    assert f"'{NAME}" in {row["account"] for row in in_csv}, "no formula"


def test_nothing_used_is_said(atelier: Atelier) -> None:
    assert atelier("usage").out == "No usage.\n"
