"""Callers repeat, disconnect or lose their ingress: one request is one job, and none is lost."""

import asyncio
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest

from serve_app.api.multipart import BLOCK_BYTES
from serve_app.domain.jobs import JobState
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from tests.api.app import BODY_A, Member, TestService, client_of, service_settings
from tests.api.test_loras import FILE_PART, FORM
from tests.composition import Resources, open_resources
from tests.faults.ingress import Fault, start_ingress
from tests.faults.reconciliation import AcknowledgedJobs, audit_service
from tests.support import wait_until

SEED = 20261121


@dataclass(slots=True)
class Ingress:
    """The application in this process and a caller with a key.

    No worker runs, so every job is canceled in the end.
    """

    settings: Settings
    resources: Resources
    client: httpx.AsyncClient
    member: Member
    acknowledged: AcknowledgedJobs

    def headers(self, key: str) -> dict[str, str]:
        return self.member.a | {"Idempotency-Key": key}

    def note(self, answer: httpx.Response) -> str:
        job_id = answer.json()["request_id"]
        self.acknowledged.note(self.member.account.id, job_id, may_end_as=[JobState.CANCELED])
        return job_id

    async def audit(self) -> list[str]:
        for job_id in self.acknowledged.all:
            await self.resources.queue.cancel(job_id, account_id=None)
        return await audit_service(self.resources, self.acknowledged)


@pytest.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[Ingress]:
    settings = service_settings(tmp_path / "var", [])
    async with open_resources(settings) as resources, client_of(resources.app()) as client:
        yield Ingress(settings, resources, client, await TestService(resources, client).member(), AcknowledgedJobs())
    stop_redis(settings.data_dir)


@asynccontextmanager
async def _in_another_process(ingress: Ingress, fault: Fault) -> AsyncGenerator[tuple[BaseProcess, httpx.AsyncClient]]:
    """An ingress with a fault, and a client of it; it is killed in the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = start_ingress(ingress.settings, listening.fileno(), fault)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                yield process, client
        finally:
            process.kill()
            process.join(10)


async def test_a_storm_of_one_request_is_one_job(ingress: Ingress) -> None:
    async def ask() -> httpx.Response:
        while True:
            answer = await ingress.client.post("/v1/generate", json=BODY_A, headers=ingress.headers("storm"))
            if answer.status_code != 503:  # a hundred at once may be too much for a busy machine: ask again
                return answer

    answers = await asyncio.gather(*(ask() for _ in range(100)))
    assert Counter(answer.status_code for answer in answers) == {202: 100}
    assert len({ingress.note(answer) for answer in answers}) == 1
    assert sum("Idempotency-Replayed" in answer.headers for answer in answers) >= 99
    assert (await ingress.resources.queue_stats.counts())["accepted"] == 1
    assert not await ingress.audit()


async def test_without_a_key_the_same_storm_is_a_hundred_jobs(ingress: Ingress) -> None:
    answers = [await ingress.client.post("/v1/generate", json=BODY_A, headers=ingress.member.a) for _ in range(100)]
    assert len({ingress.note(answer) for answer in answers}) == 100
    assert not await ingress.audit()


async def test_a_caller_who_disconnects_gets_one_job_or_none_and_the_same_when_asking_again(ingress: Ingress) -> None:
    """The request is cut off after any number of turns of the loop, as when its connection breaks."""
    rnd = random.Random(SEED)
    cut = 0
    for number in range(60):
        headers = ingress.headers(f"k{number}")
        asking = asyncio.create_task(ingress.client.post("/v1/generate", json=BODY_A, headers=headers))
        for _ in range(rnd.randrange(40)):
            await asyncio.sleep(0)
        cut += asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        again = await ingress.client.post("/v1/generate", json=BODY_A, headers=headers)
        ingress.note(again)
    await wait_until(lambda: not ingress.resources.background.count)
    assert cut > 30, "most of them must really be cut off"
    assert (await ingress.resources.queue_stats.counts())["accepted"] == 60
    assert not await ingress.audit()


@pytest.mark.parametrize("fault", ["dies before accept", "dies after accept"])
async def test_an_ingress_killed_around_its_accept_costs_the_caller_one_repeat(ingress: Ingress, fault: Fault) -> None:
    async with _in_another_process(ingress, fault) as (dying, client):
        with pytest.raises(httpx.TransportError):
            await client.post("/v1/generate", json=BODY_A, headers=ingress.headers("once"))
        await wait_until(lambda: dying.exitcode == -signal.SIGKILL, timeout=30)
    accepted = (await ingress.resources.queue_stats.counts()).get("accepted", 0)
    assert accepted == (1 if fault == "dies after accept" else 0)
    again = await ingress.client.post("/v1/generate", json=BODY_A, headers=ingress.headers("once"))
    ingress.note(again)
    assert ("Idempotency-Replayed" in again.headers) == (fault == "dies after accept")
    assert (await ingress.resources.queue_stats.counts())["accepted"] == 1
    assert not await ingress.audit()


async def test_an_upload_of_another_ingress_is_let_alone_until_that_ingress_is_killed(ingress: Ingress) -> None:
    folder = ingress.settings.data_dir / "uploads"

    def left() -> list[Path]:
        return list(folder.glob("*/file"))

    async def endless() -> AsyncIterator[bytes]:
        yield FILE_PART + bytes(2 * BLOCK_BYTES)
        await asyncio.Event().wait()

    async with _in_another_process(ingress, "dies before accept") as (other, client):
        sending = client.post("/v1/loras", headers=FORM | ingress.member.a, content=endless())
        uploading = asyncio.create_task(sending)
        await wait_until(lambda: bool(left()), timeout=30)
        ingress.resources.uploads.sweep()
        assert left()
        other.kill()
        other.join(10)
        uploading.cancel()
    ingress.resources.uploads.sweep()
    assert not list(folder.iterdir())


async def test_an_ingress_whose_log_disk_is_full_refuses_and_accepts_as_ever(ingress: Ingress) -> None:
    async with _in_another_process(ingress, "log disk full") as (_, client):
        ingress.note(await client.post("/v1/generate", json=BODY_A, headers=ingress.headers("first")))
        os.kill(ensure_redis(ingress.settings.data_dir).pid, signal.SIGKILL)
        refused = await client.post("/v1/generate", json=BODY_A, headers=ingress.headers("second"))
        ensure_redis(ingress.settings.data_dir)
        ingress.note(await client.post("/v1/generate", json=BODY_A, headers=ingress.headers("second")))
    assert refused.status_code == 503
    assert not await ingress.audit()
