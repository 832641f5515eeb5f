"""A job acknowledged under `accept_replicas` is on replicas, and survives the loss of the primary."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.queue import JobQueue
from serve_app.settings import Settings
from serve_app.store.redis_client import connect
from tests.made_jobs import new_job
from tests.store.redis_servers import server, until_it_answers
from tests.support import plain_redis, wait_until


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[int, int]]:
    """Start a primary and its replica by TCP, which the embedded server lacks; yield their ports."""
    with (
        server(tmp_path / "one", ["repl-diskless-sync-delay 0"]) as primary,
        server(tmp_path / "two", [f"replicaof 127.0.0.1 {primary}"]) as replica,
    ):
        for port in (primary, replica):
            await until_it_answers(port)
        await wait_until(lambda: _admin(replica).info("replication")["master_link_status"] == "up")
        yield primary, replica


def _admin(port: int) -> Any:
    return plain_redis(f"redis://127.0.0.1:{port}", socket_timeout=5)


def _kill(port: int) -> None:
    os.kill(_admin(port).info("server")["process_id"], signal.SIGKILL)


def _queue(port: int, folder: Path, *, replicas: int) -> tuple[Any, JobQueue]:
    client = connect(f"redis://127.0.0.1:{port}")
    return client, JobQueue(client, Settings(data_dir=folder, redis_url="unix:///unused", accept_replicas=replicas))


async def test_an_acknowledged_job_is_on_the_replica_when_the_primary_dies(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    client, queue = _queue(pair[0], tmp_path, replicas=1)
    jobs = [new_job() for _ in range(20)]
    await asyncio.gather(*(queue.accept(job) for job in jobs))
    _kill(pair[0])
    await client.aclose()
    _admin(pair[1]).replicaof("no", "one")
    client, queue = _queue(pair[1], tmp_path, replicas=0)
    claims = await queue.claim("w", pool=JobKind.GENERATION, nonce="n", limit=20)
    assert {claim.lease.job_id for claim in claims} == {job.job_id for job in jobs}
    await client.aclose()


@pytest.mark.slow
async def test_without_its_replica_a_job_is_not_acknowledged_and_may_be_sent_again(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    _kill(pair[1])
    client, queue = _queue(pair[0], tmp_path, replicas=1)
    job = new_job()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            await queue.accept(job)
    assert (await QueueStats(client).backlog(JobKind.GENERATION)).ready == 1
    await client.aclose()
