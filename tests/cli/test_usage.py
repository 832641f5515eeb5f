"""`atelier usage`: what accounts used, as a table, JSON and CSV."""

import csv
from io import StringIO

import pytest

from serve_app.domain.jobs import JobKind, NewJob, StoredImage, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.jobs.queue import new_nonce
from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.support import adapter_id

NAME = "=HYPERLINK(evil)"


async def _used(resources: Resources) -> None:
    """Draw for two accounts: one with a key, in two jobs, the other in the console.

    The second account's name is a formula.
    """
    for name, images, has_key in (("acme", (1, 2), True), (NAME, (3,), False)):
        account = await resources.accounts.create(name)
        key_id = ""
        if has_key:
            key, _ = await resources.api_keys.create(account.id, interfaces=frozenset(Variant), name="laptop")
            key_id = key.id
        for number in images:
            request = GenerationRequest(
                prompt="a boat", lora_id=adapter_id("outline"), seeds=tuple(range(number)), steps=20
            )
            await resources.queue.accept(
                NewJob(
                    job_id=new_job_id(JobKind.GENERATION),
                    variant=Variant.A,
                    account_id=account.id,
                    request=request,
                    adapter_id=adapter_id("outline"),
                    key_id=key_id,
                )
            )
            [claim] = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce(), limit=1)
            stored = [
                StoredImage(
                    image_id=new_image_id(), image_uri=f"memory://{n}", width=8, height=8, sha256="0" * 64, size_bytes=9
                )
                for n in range(number)
            ]
            await resources.queue.finish(claim.lease, stored, seconds=0.5)


@pytest.mark.slow
def test_usage_is_shown_by_account_day_key_and_lora(atelier: Atelier) -> None:
    atelier.stores(_used)
    rows = atelier.json("usage")["usage"]
    found = {row["account"]: row for row in rows}
    assert len(rows) == 2
    assert found["acme"]["images"] == 3
    assert found["acme"] | {"key": "laptop", "lora": "Outline", "worker_seconds": 1.0} == found["acme"]
    assert (found[NAME]["key"], found[NAME]["key_id"], found[NAME]["images"]) == ("console", "", 3)
    assert [row["account"] for row in atelier.json("usage", "--account", "acme")["usage"]] == ["acme"]
    table = atelier("usage").out
    assert "laptop" in table
    assert "Outline" in table
    in_csv = list(csv.DictReader(StringIO(atelier("usage", "--csv").out)))
    assert {row["account"].removeprefix("'"): int(row["images"]) for row in in_csv} == {"acme": 3, NAME: 3}
    assert in_csv[0].keys() == rows[0].keys()
    assert f"'{NAME}" in {row["account"] for row in in_csv}, "no formula"


def test_nothing_used_is_said_and_a_wrong_call_is_refused(atelier: Atelier) -> None:
    assert atelier("usage").out == "No usage.\n"
    assert atelier("usage", "--days", "401").code == 2
    assert atelier("usage", "--account", "nobody").code == 1
