"""A Redis that fills up refuses what makes it grow, and goes on with all that ends or protects."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.domain.accounts import Account
from serve_app.domain.jobs import HeartbeatReply, JobKind, JobState
from serve_app.jobs.queue import new_nonce
from serve_app.store import measures as redis_memory
from tests.api.app import LORA, Member, TestService, refused
from tests.audit import audit
from tests.composition import Resources
from tests.support import memory_limit, wait_until
from tests.web.conftest import PASSWORD, Browsers

SPACE = 3 << 20
LARGEST = "".join(chr(0x1F300 + n * 577 % 800) for n in range(4_000))


@pytest.fixture
async def full(
    service: TestService, member: Member, redis_db: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[str]]:
    """The jobs by which one account has filled a small Redis, through the API, until it was refused."""
    monkeypatch.setattr(redis_memory, "CHECK_EVERY_S", 0.0)
    await service.resources.accounts.set_plans(member.account.id, plan_a="enterprise")
    most = redis_db.info("memory")["used_memory"] + SPACE
    ids, body = list[str](), {"prompt": LARGEST, "lora_id": LORA}
    with memory_limit(redis_db, most):
        while (answer := await service.client.post("/v1/generate", json=body, headers=member.a)).status_code == 202:
            ids.append(answer.json()["request_id"])
        refused(answer, 503, "unavailable")
        assert int(answer.headers["Retry-After"]) > 0
        assert redis_db.info("memory")["used_memory"] < most, "the reserve is there"
        yield ids
    assert audit(redis_db, max_attempts=5) == []


async def test_a_full_redis_lets_jobs_end_and_go_and_their_owners_and_operators_in(
    service: TestService,
    resources: Resources,
    member: Member,
    owner: Account,
    browsers: Browsers,
    redis_db: Any,
    full: list[str],
) -> None:
    """The reserve is used up, too: where it is left, there is more space."""
    assert len(full) > 30
    redis_db.config_set("maxmemory", 1)
    waiting, deleted, *_ = full[::-1]
    (claim,) = await resources.queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce())
    assert await resources.queue.heartbeat(claim.lease, progress=5) is HeartbeatReply.OK
    for job_id in (claim.lease.job_id, waiting, deleted):
        canceled = await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=member.a)
        assert canceled.status_code in (200, 202), canceled.text
    assert await resources.queue.heartbeat(claim.lease, progress=6) is HeartbeatReply.CANCEL
    await resources.queue.release(claim.lease)
    assert (await service.client.delete(f"/v1/jobs/{deleted}", headers=member.a)).status_code == 204
    done = await service.complete(full[1])
    assert done.state is JobState.COMPLETED
    image = f"/v1/jobs/{done.id}/images/{done.images[0].image_id}"
    assert (await service.client.delete(image, headers=member.a)).status_code == 204
    assert (await browsers.new().sign_in(owner.name, PASSWORD)).answer.url.path == "/console/settings"
    await resources.accounts.set_disabled(owner.id, True)
    assert (await service.client.get(f"/v1/jobs/{waiting}", headers=member.a)).status_code == 401
    await resources.queue.reap()


async def test_a_full_redis_takes_no_new_keys_uploads_or_users_from_customers_until_there_is_space(
    service: TestService, member: Member, owner: Account, browsers: Browsers, redis_db: Any, full: list[str]
) -> None:
    redis_db.config_set(
        "maxmemory", int(redis_db.info("memory")["used_memory"] * 1.05)
    )  # the bytes of the last request are free again
    browser = await browsers.signed_in(owner.name)
    assert (await browser.press("/console/settings/api", "Generate API key", key_name="one more")).status == 503
    users = await browser.open("/console/settings/users")
    assert (await browser.send(users.form("Invite"), name="one more", role="member")).status == 503
    drawn = await browser.press("/console/playground", "Generate", prompt="a boat")
    assert (drawn.status, "Temporarily unavailable" in drawn.text) == (503, True)
    upload = await service.client.post("/v1/loras", files={"file": b"x"}, headers=member.a)
    assert upload.status_code == 503
    for job_id in full[:150]:  # more than the scripts that do it take, which count as memory too
        await service.resources.queue.cancel(job_id, account_id=None)
        await service.resources.deletions.delete_job(job_id, account_id=None)
    body = {"prompt": "a boat", "lora_id": LORA}

    async def is_accepted() -> bool:
        return (await service.client.post("/v1/generate", json=body, headers=member.a)).status_code == 202

    await wait_until(is_accepted)  # Redis frees what was deleted a little later
