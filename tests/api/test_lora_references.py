"""LoRAs are added without sending their weights: by a known digest, or from an allowed address."""

import hashlib
import json
from typing import Any

import fsspec
import httpx
import pytest

from tests.api.app import Member, TestService
from tests.api.test_loras import SAID, refused, registered, uploads

WEIGHTS = b"weights of its own"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


async def add(service: TestService, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await service.client.post("/v1/loras", headers=headers, json=SAID | fields)


async def test_weights_that_the_account_has_are_not_sent_again_and_a_digest_alone_gives_nobody_anothers(
    service: TestService, member: Member
) -> None:
    own = await registered(service, member, sha256=SHA256)
    known = await add(service, member.b, sha256=SHA256)
    assert (known.status_code, known.json()["id"]) == (200, own)
    friend = await service.member()
    await service.resources.adapter_grants.grant(own, friend.account.id)
    for headers, sha256 in ((friend.a, SHA256), (member.a, "0" * 64)):
        refused(await add(service, headers, sha256=sha256), 404, "not_found", "send the file")
    elsewhere = await registered(service, member, sha256="1" * 64, base_model="other")
    refused(await add(service, member.a, sha256="1" * 64), 404, "not_found", "send the file")
    assert await service.resources.catalog.owned_ids(member.account.id) == [own, elsewhere]


@pytest.mark.parametrize("sent", [None, "application/merge-patch+json", "Application/JSON; charset=utf-8"])
async def test_a_reference_is_json_by_every_name_that_it_has_elsewhere(
    service: TestService, member: Member, sent: str | None
) -> None:
    own = await registered(service, member, sha256=SHA256)
    headers = member.a | ({"Content-Type": sent} if sent else {})
    body = json.dumps(SAID | {"sha256": SHA256})
    known = await service.client.post("/v1/loras", headers=headers, content=body)
    assert (known.status_code, known.json()["id"]) == (200, own)


async def test_what_the_service_fetches_goes_the_way_of_an_upload(service: TestService, member: Member) -> None:
    """It is followed up to the question of the quota: checks that start a process are in `test_loras.py`."""
    fsspec.filesystem("memory").pipe({"/loras/ink": WEIGHTS, "/secret": WEIGHTS})
    own = await registered(service, member, sha256=SHA256)
    again = await add(service, member.a, source="memory://loras/ink")
    assert (again.status_code, again.json()["id"]) == (200, own)
    refused(await add(service, member.a, source="memory://secret"), 400, "invalid_parameter", "source: must be a plain")
    refused(await add(service, member.a, source="memory://loras/none"), 400, "invalid_parameter", "no such file")
    assert uploads(service) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "send either sha256 or source"),
        ({"sha256": SHA256, "source": "memory://loras/ink"}, "send either sha256 or source"),
        ({"sha256": "x"}, "sha256: must be 64 to 64 characters long"),
        ({"sha256": SHA256.upper()}, "sha256: "),
        ({"source": None, "sha256": SHA256}, "source: "),
        ({"sha256": SHA256, "trigger_words": "ink"}, "trigger_words: must be a list"),
        ({"sha256": SHA256, "file": "x"}, "unknown field"),
    ],
    ids=["neither", "both", "short", "upper case", "null", "words", "unknown"],
)
async def test_a_reference_that_is_wrong_is_refused_by_its_field(
    service: TestService, regular: Member, fields: dict[str, Any], text: str
) -> None:
    refused(await add(service, regular.a, **fields), 400, "invalid_parameter", text)
