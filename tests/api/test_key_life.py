"""Keys that expire and keys that are rolled, as their holders see it."""

from datetime import timedelta

import httpx
import pytest

from tests.api.app import ALL, BODY_A, Member, TestService, error_of
from tests.support import wait_until

LIFE = timedelta(seconds=2)
UNKNOWN_KEY = {"Authorization": "Bearer atl_nobody"}


async def use(service: TestService, secret: str) -> httpx.Response:
    return await service.client.post("/v1/generate", json=BODY_A, headers={"Authorization": f"Bearer {secret}"})


async def stops(service: TestService, secret: str) -> None:
    """Wait until the key is refused; until then it works."""

    async def is_refused() -> bool:
        answer = await use(service, secret)
        assert answer.status_code in (202, 401)
        return answer.status_code == 401

    await wait_until(is_refused)


@pytest.mark.slow
async def test_an_expired_key_is_refused_like_one_that_never_was(service: TestService, member: Member) -> None:
    _, secret = await service.resources.api_keys.create(member.account.id, interfaces=ALL, expires_in=LIFE)
    accepted = await use(service, secret)
    assert accepted.status_code == 202
    await stops(service, secret)
    bearer = {"Authorization": f"Bearer {secret}"}
    path = f"/v1/generate/{accepted.json()['request_id']}"
    for method, place in (("POST", "/v1/generate"), ("GET", path), ("GET", "/v1/jobs")):
        refused, other = [await service.client.request(method, place, headers=h) for h in (bearer, UNKNOWN_KEY)]
        assert error_of(refused)["code"] == "unauthorized"
        assert (refused.status_code, refused.content) == (401, other.content)
        for header in ("www-authenticate", "x-ratelimit-limit", "x-ratelimit-remaining"):
            assert refused.headers[header] == other.headers[header]
    assert (await service.client.get("/v1/models", headers={"X-API-Key": secret})).status_code == 401
    assert (await service.client.get(path, headers=member.a)).status_code == 200, "the account's other key goes on"


async def test_without_grace_a_rolled_key_stops_at_once(service: TestService, member: Member) -> None:
    api_keys = service.resources.api_keys
    old, old_secret = await api_keys.create(member.account.id, interfaces=ALL)
    _, new_secret = await api_keys.roll(old.id, grace=timedelta())
    assert [(await use(service, secret)).status_code for secret in (old_secret, new_secret)] == [401, 202]
