"""A key that ends by itself, and one that another replaces, as their holders see it."""

from datetime import timedelta

import httpx

from serve_app.domain.requests import Variant
from tests.api.house import ALL, BODY_A, House, Member, error_of
from tests.support import wait_until

LIFE = timedelta(seconds=3)
UNKNOWN_KEY = {"Authorization": "Bearer atl_nobody"}


async def use(house: House, secret: str) -> httpx.Response:
    return await house.client.post("/v1/generate", json=BODY_A, headers={"Authorization": f"Bearer {secret}"})


async def stops(house: House, secret: str) -> None:
    """Wait until the key is refused; until then it works."""

    async def is_refused() -> bool:
        answer = await use(house, secret)
        assert answer.status_code in (202, 401)
        return answer.status_code == 401

    await wait_until(is_refused)


async def test_an_expired_key_is_refused_like_one_that_never_was(house: House, member: Member) -> None:
    _, secret = await house.resources.accounts.create_key(member.account.id, interfaces=ALL, expires_in=LIFE)
    accepted = await use(house, secret)
    assert accepted.status_code == 202
    await stops(house, secret)
    bearer = {"Authorization": f"Bearer {secret}"}
    path = f"/v1/generate/{accepted.json()['request_id']}"
    for method, place in (("POST", "/v1/generate"), ("GET", path), ("GET", "/v1/jobs")):
        refused, stranger = [await house.client.request(method, place, headers=h) for h in (bearer, UNKNOWN_KEY)]
        assert error_of(refused)["code"] == "unauthorized"
        assert (refused.status_code, refused.content) == (401, stranger.content)
        for header in ("www-authenticate", "x-ratelimit-limit", "x-ratelimit-remaining"):
            assert refused.headers[header] == stranger.headers[header]
    assert (await house.client.get("/v1/models", headers={"X-API-Key": secret})).status_code == 401
    assert (await house.client.get(path, headers=member.a)).status_code == 200, "the account's other key goes on"


async def test_a_rolled_key_works_through_its_grace_and_its_successor_beyond(house: House, member: Member) -> None:
    accounts = house.resources.accounts
    old, old_secret = await accounts.create_key(member.account.id, name="ci", interfaces=frozenset({Variant.A}))
    new, new_secret = await accounts.roll_key(old.id, grace=LIFE)
    assert (new.name, new.interfaces, new.expires_at) == ("ci", {Variant.A}, None)
    assert (await use(house, old_secret)).status_code == 202
    assert (await use(house, new_secret)).status_code == 202
    await stops(house, old_secret)
    assert (await use(house, new_secret)).status_code == 202


async def test_without_grace_a_rolled_key_stops_at_once(house: House, member: Member) -> None:
    accounts = house.resources.accounts
    old, old_secret = await accounts.create_key(member.account.id, interfaces=ALL)
    _, new_secret = await accounts.roll_key(old.id, grace=timedelta())
    assert [(await use(house, secret)).status_code for secret in (old_secret, new_secret)] == [401, 202]
