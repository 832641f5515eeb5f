"""A job acknowledged under `accept_replicas` is on replicas, and survives the loss of the primary."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobKind, NewJob, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.queue import JobQueue
from serve_app.settings import Settings
from serve_app.store.redis_client import connect
from tests.store.redis_servers import server, until_it_answers
from tests.support import wait_until

REQUEST = GenerationRequest(prompt="a boat", lora_id="model_x", seeds=(1,))


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[int, int]]:
    """Start a primary and its replica by TCP, which the embedded server lacks; yield their ports."""
    with (
        server(tmp_path / "one", []) as primary,
        server(tmp_path / "two", [f"replicaof 127.0.0.1 {primary}"]) as replica,
    ):
        for port in (primary, replica):
            await until_it_answers(port)
        await wait_until(lambda: _admin(primary).info("replication")["connected_slaves"] == 1)
        yield primary, replica


def _admin(port: int) -> Any:
    return cast(Any, redis.Redis(port=port, socket_timeout=5))


def _kill(port: int) -> None:
    os.kill(_admin(port).info("server")["process_id"], signal.SIGKILL)


async def _accept(queue: JobQueue, job_id: str) -> None:
    await queue.accept(NewJob(job_id=job_id, variant=Variant.A, account_id="acct_a", request=REQUEST, group="g"))


def _queue(port: int, folder: Path, *, replicas: int) -> tuple[Any, JobQueue]:
    client = connect(f"redis://127.0.0.1:{port}")
    return client, JobQueue(client, Settings(data_dir=folder, redis_url="unix:///unused", accept_replicas=replicas))


async def test_an_acknowledged_job_is_on_the_replica_when_the_primary_dies(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    client, queue = _queue(pair[0], tmp_path, replicas=1)
    job_ids = [new_job_id(JobKind.GENERATION) for _ in range(20)]
    await asyncio.gather(*(_accept(queue, job_id) for job_id in job_ids))
    _kill(pair[0])
    await client.aclose()
    _admin(pair[1]).replicaof("no", "one")
    client, queue = _queue(pair[1], tmp_path, replicas=0)
    claims = await queue.claim("w", kind=JobKind.GENERATION, nonce="n", limit=20)
    assert {claim.lease.job_id for claim in claims} == set(job_ids)
    await client.aclose()


@pytest.mark.slow
async def test_without_its_replica_a_job_is_not_acknowledged_and_may_be_sent_again(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    _kill(pair[1])
    client, queue = _queue(pair[0], tmp_path, replicas=1)
    job_id = new_job_id(JobKind.GENERATION)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            await _accept(queue, job_id)
    assert (await QueueStats(client).backlog(JobKind.GENERATION)).ready == 1
    await client.aclose()
