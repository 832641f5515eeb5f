"""`POST /v1/account/delete` asks for an owner's password; `tests/operations` looks for what is left."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.accounts.sign_in import HERE
from serve_app.domain.accounts import Role
from serve_app.domain.audit import OWNER, Act, api_key
from serve_app.domain.audit import user as user_actor
from serve_app.domain.requests import Variant
from tests.api.app import Member, TestService, error_of, open_service, refused
from tests.faults.storage import ERROR, register_faulty, set_fault

PASSWORD = "correct horse battery"
PROMPT = "a lighthouse of an account that goes"


@pytest.fixture
async def leaving(service: TestService) -> Member:
    return await with_jobs(service)


async def with_jobs(service: TestService) -> Member:
    """Make an account with a password, a finished job and a waiting one."""
    member = await service.member()
    await service.resources.accounts.set_password(member.account.id, PASSWORD)
    await service.complete(await service.submit(member, prompt=PROMPT))
    await service.submit(member, prompt=PROMPT)
    return member


async def delete(service: TestService, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await service.client.post("/v1/account/delete", json=body, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("asked_with", Variant)
async def test_an_account_goes_with_everything(service: TestService, leaving: Member, asked_with: Variant) -> None:
    account = leaving.account
    answer = await delete(service, leaving.headers(asked_with), account=account.name, password=PASSWORD)
    expected = {"account_id": account.id, "status": "deleted", "jobs": 2, "keys": 1, "verified": True}
    assert (answer.status_code, answer.json()) == (200, expected)
    assert (await service.client.get("/v1/jobs", headers=leaving.a)).status_code == 401
    [*_, row] = await service.resources.audit.rows(account.id)
    assert (row.act, row.actor, row.address) == (Act.ACCOUNT_DELETED, OWNER, "127.0.0.1")


async def test_only_an_owner_with_the_password_and_the_name_deletes(service: TestService, leaving: Member) -> None:
    account, other = leaving.account, await service.member()
    await service.resources.accounts.set_password(other.account.id, "another good password")
    member_user = await service.resources.users.create(account.id, f"ann@{account.id}", Role.MEMBER)
    await service.resources.accounts.set_password(account.id, PASSWORD + "!", user_id=member_user.id)
    wrong: list[tuple[int, dict[str, str]]] = [
        (400, {"account": "something else", "password": PASSWORD}),
        (400, {"password": PASSWORD}),
        (400, {"account": account.name}),
        (403, {"account": account.name, "password": "wrong horse battery"}),
        (403, {"account": account.name, "password": "x" * 128}),
        (403, {"account": account.name, "user": member_user.name, "password": PASSWORD + "!"}),
        (403, {"account": account.name, "user": other.account.name, "password": "another good password"}),
    ]
    for status, body in wrong:
        answer = await delete(service, leaving.a, **body)
        refused(answer, status, {400: "invalid_parameter", 403: "forbidden"}[status])
    assert (await service.client.get("/v1/jobs", headers=leaving.a)).status_code == 200
    [key] = await service.resources.api_keys.list(account.id)
    rows = [(row.act, row.actor) for row in await service.resources.audit.rows(account.id)]
    assert rows == [(Act.SIGN_IN_FAILED, api_key(key.id))] * 4


async def test_an_invited_owner_deletes_by_the_own_password(service: TestService, leaving: Member) -> None:
    account, resources = leaving.account, service.resources
    invited = await resources.users.create(account.id, f"bob@{account.id}", Role.OWNER)
    await resources.accounts.set_password(account.id, PASSWORD + "!", user_id=invited.id)
    body = {"account": account.name, "user": invited.name, "password": PASSWORD + "!"}
    assert (await delete(service, leaving.b, **body)).json()["verified"]
    [row] = await resources.audit.rows(account.id)
    assert row.actor == user_actor(invited.id)


async def test_passwords_are_not_guessed_with_a_key(service: TestService, leaving: Member) -> None:
    for _ in range(5):
        assert (await delete(service, leaving.a, account=leaving.account.name, password="guess")).status_code == 403
    answer = await delete(service, leaving.a, account=leaving.account.name, password=PASSWORD)
    refused(answer, 429, "rate_limit_exceeded")
    assert 0 < int(answer.headers["retry-after"]) <= 15


async def test_a_user_of_another_account_is_answered_and_counted_as_an_unknown_one(
    service: TestService, leaving: Member
) -> None:
    """Nothing is learned of their passwords, and nothing of theirs is changed."""
    other, resources, theirs = await service.member(), service.resources, "another good password"
    await resources.accounts.set_password(other.account.id, theirs)
    invited = await resources.users.create(other.account.id, f"eve@{other.account.id}", Role.OWNER)
    await resources.accounts.set_password(other.account.id, theirs, user_id=invited.id)
    for _ in range(HERE.free):
        await resources.sign_ins.count(invited.name, "127.0.0.1", None)
    names = (other.account.name, other.account.id, invited.name, f"nobody@{other.account.id}")
    answers: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
    for name in names:
        for _ in range(HERE.free + 1):
            answer = await delete(service, leaving.a, account=leaving.account.name, user=name, password=theirs)
            answers[name].append((answer.status_code, error_of(answer)["code"]))
    assert list(answers.values()) == [[(403, "forbidden")] * HERE.free + [(429, "rate_limit_exceeded")]] * len(names)
    assert (await resources.sign_ins.count(invited.name, "127.0.0.1", None)).wait, "their own tries still count"
    assert not (await resources.sign_ins.count(other.account.id, "127.0.0.1", None)).wait, "and none was added"
    assert await resources.audit.rows(other.account.id) == []
    assert len(await resources.audit.rows(leaving.account.id)) == HERE.free * len(names)


async def test_a_right_password_that_deletes_nothing_takes_back_no_try(service: TestService, leaving: Member) -> None:
    account = leaving.account
    user = await service.resources.users.create(account.id, f"joe@{account.id}", Role.MEMBER)
    await service.resources.accounts.set_password(account.id, PASSWORD, user_id=user.id)
    body = {"account": account.name, "user": user.name, "password": PASSWORD}
    statuses = [(await delete(service, leaving.a, **body)).status_code for _ in range(HERE.free + 1)]
    assert statuses == [403] * HERE.free + [429]


async def test_what_the_storage_does_not_remove_now_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_faulty()
    bucket = tmp_path / "bucket"
    (bucket / "images").mkdir(parents=True)
    async with open_service(tmp_path / "service", storage_url=f"faulty://{bucket}") as service:
        member = await with_jobs(service)
        set_fault(bucket, ERROR)
        answer = await delete(service, member.a, account=member.account.name, password=PASSWORD)
        assert answer.json() == {"account_id": member.account.id, "status": "deleting"}
        assert (await service.client.get("/v1/jobs", headers=member.a)).status_code == 401
        assert list(bucket.rglob("*.png"))
        set_fault(bucket, None)
        monkeypatch.setattr("serve_app.operations.account_deletion.CUT_SHORT_AFTER", timedelta())
        assert await service.resources.account_deletion.finish_removals() == 1
        assert list(bucket.rglob("*.png")) == []
