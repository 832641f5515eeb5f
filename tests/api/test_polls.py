"""Polls that need not send or ask again: entity tags, and waiting for the end of a job."""

import asyncio
import logging
import time
from datetime import timedelta

import httpx
import pytest

from serve_app.api.responses import LONGEST_WAIT_S, preferred_wait
from serve_app.domain.requests import Variant
from serve_app.jobs import waits as job_waits
from serve_app.jobs.history import JobReader
from serve_app.jobs.waits import JobWaits
from serve_app.store import redis_client as stores_redis
from tests.api.app import Member, TestService, client_of
from tests.support import wait_until

PATHS = [(Variant.A, "/v1/generate/"), (Variant.A, "/v1/jobs/"), (Variant.B, "/v1/generations/")]


@pytest.mark.parametrize(("variant", "path"), PATHS)
async def test_an_unchanged_record_is_not_sent_again(
    service: TestService, member: Member, variant: Variant, path: str
) -> None:
    job_id, headers = await service.submit(member, variant), member.headers(variant)
    waiting = await service.client.get(path + job_id, headers=headers)
    await service.complete(job_id)
    known = headers | {"If-None-Match": waiting.headers["etag"]}
    completed = await service.client.get(path + job_id, headers=known)
    assert completed.status_code == 200
    known = headers | {"If-None-Match": f'"other", W/{completed.headers["etag"]}'}
    again = await service.client.get(path + job_id, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == completed.headers["etag"]
    assert "x-ratelimit-limit" in again.headers
    other = (await service.member()).headers(variant)
    assert (await service.client.get(path + job_id, headers=known | other)).status_code == 404


@pytest.mark.slow
async def test_who_has_waited_long_enough_gets_the_record_and_preferences_may_come_on_lines_of_their_own(
    service: TestService, member: Member
) -> None:
    job_id = await service.submit(member)
    lines = [*member.a.items(), ("Prefer", "respond-async"), ("Prefer", "wait=1")]
    answer = await service.client.get(f"/v1/generate/{job_id}", headers=lines)
    assert (answer.json()["status"], answer.headers["preference-applied"]) == ("processing", "wait=1")
    tags = [*member.a.items(), ("If-None-Match", '"other"'), ("If-None-Match", answer.headers["etag"])]
    assert (await service.client.get(f"/v1/generate/{job_id}", headers=tags)).status_code == 304


@pytest.mark.parametrize(("variant", "path"), PATHS)
async def test_a_caller_that_prefers_to_wait_is_answered_when_the_job_ends(
    service: TestService, member: Member, variant: Variant, path: str
) -> None:
    job_id, waits = await service.submit(member, variant), service.resources.waits
    headers = member.headers(variant) | {"Prefer": "respond-async, wait=600"}
    polls = [asyncio.create_task(service.client.get(path + job_id, headers=headers)) for _ in range(3)]
    await wait_until(lambda: waits.count == len(polls))
    await service.complete(job_id)
    for answer in await asyncio.gather(*polls):
        assert answer.headers["preference-applied"] == f"wait={LONGEST_WAIT_S}"
        assert answer.json()["status"] == "completed"
    assert waits.count == 0


async def test_nobody_waits_beyond_the_places_nor_one_account_in_all_of_them(
    service: TestService, member: Member
) -> None:
    waits = JobWaits(service.resources.jobs, most=8)
    async with client_of(service.resources.with_parts(waits=waits).app()) as client:
        job_id, headers = await service.submit(member), member.a | {"Prefer": "wait=30"}

        async def poll() -> httpx.Response:
            return await client.get(f"/v1/generate/{job_id}", headers=headers)

        held = [asyncio.create_task(poll()) for _ in range(2)]
        await wait_until(lambda: waits.count == 2)
        beyond = await poll()
        assert (beyond.status_code, beyond.json()["status"]) == (200, "processing")
        assert "preference-applied" not in beyond.headers
        await service.resources.queue.cancel(job_id, account_id=member.account.id)
        assert {answer.json()["status"] for answer in await asyncio.gather(*held)} == {"failed"}


async def test_a_wait_outlives_an_outage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(job_waits, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(stores_redis, "RETRIES", 0)
    caplog.set_level(logging.DEBUG, logger=job_waits.log.name)
    unreachable = stores_redis.connect("redis://127.0.0.1:1/0")
    waiting = asyncio.create_task(
        JobWaits(JobReader(unreachable), most=8).until_ended("gen_x", account_id="acct_a", seconds=30)
    )
    await wait_until(lambda: caplog.text.count("jobs waited for were not looked at") >= 2)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await unreachable.aclose()


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ("wait=5", 5),
        ('Wait = "7" ; x', 7),
        ("respond-async, wait=99999", LONGEST_WAIT_S),
        ("wait=0", 0),
        ("wait", 0),
        ("wait=-1", 0),
        ("wait=²", 0),
        ("await=9", 0),
        ("", 0),
    ],
)
def test_only_a_wait_in_whole_seconds_is_heeded(prefer: str, seconds: int) -> None:
    assert preferred_wait(prefer) == seconds


async def test_an_image_address_stays_the_same_and_opens_for_its_whole_life(
    service: TestService, member: Member
) -> None:
    job = await service.complete(await service.submit(member))
    images, life = service.resources.images, service.resources.settings.image_url_life
    first, second = (images.url(job.images[0].image_uri, base_url="http://x") for _ in range(2))
    assert first == second
    query = httpx.URL(first).params
    assert timedelta(seconds=int(query["exp"]) - time.time()) >= life
    assert (await service.client.get(httpx.URL(first).raw_path.decode())).status_code == 200
