"""With `accept_replicas` an acknowledged job is on replicas, and survives the primary's loss."""

import asyncio
import subprocess
from collections.abc import Iterator
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
from serve_app.store.redis_process import server_binary
from tests.support import free_port, wait_until

REQUEST = GenerationRequest(prompt="a boat", lora_id="model_x", seeds=(1,))


class Pair:
    """A primary and its replica on local ports.

    Replication needs TCP, which the embedded server never opens.
    """

    def __init__(self, folder: Path) -> None:
        self.ports = (free_port(), free_port())
        self._processes = [_serve(port, folder / str(port)) for port in self.ports]
        self.primary, self.replica = (
            cast(
                Any, redis.Redis(port=port, decode_responses=True, encoding_errors="surrogateescape", socket_timeout=5)
            )
            for port in self.ports
        )

    async def replicate(self) -> None:
        for client in (self.primary, self.replica):
            await wait_until(lambda client=client: _answers(client))
        self.replica.replicaof("127.0.0.1", self.ports[0])
        await wait_until(lambda: self.primary.info("replication")["connected_slaves"] == 1)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def close(self) -> None:
        for number in range(2):
            self.kill(number)
        self.primary.close()
        self.replica.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    opened = Pair(tmp_path)
    yield opened
    opened.close()


async def _accept(queue: JobQueue, job_id: str) -> None:
    await queue.accept(NewJob(job_id=job_id, variant=Variant.A, account_id="acct_a", request=REQUEST, group="g"))


def _queue(port: int, folder: Path, *, replicas: int) -> tuple[Any, JobQueue]:
    client = connect(f"redis://127.0.0.1:{port}")
    return client, JobQueue(client, Settings(data_dir=folder, redis_url="unix:///unused", accept_replicas=replicas))


async def test_an_acknowledged_job_is_on_the_replica_when_the_primary_dies(pair: Pair, tmp_path: Path) -> None:
    await pair.replicate()
    client, queue = _queue(pair.ports[0], tmp_path, replicas=1)
    job_ids = [new_job_id(JobKind.GENERATION) for _ in range(20)]
    await asyncio.gather(*(_accept(queue, job_id) for job_id in job_ids))
    pair.kill(0)
    await client.aclose()
    pair.replica.replicaof("no", "one")
    client, queue = _queue(pair.ports[1], tmp_path, replicas=0)
    claims = await queue.claim("w", kind=JobKind.GENERATION, nonce="n", limit=20)
    assert {claim.lease.job_id for claim in claims} == set(job_ids)
    await client.aclose()


@pytest.mark.slow
async def test_without_its_replica_a_job_is_not_acknowledged_and_may_be_sent_again(pair: Pair, tmp_path: Path) -> None:
    await pair.replicate()
    pair.kill(1)
    client, queue = _queue(pair.ports[0], tmp_path, replicas=1)
    job_id = new_job_id(JobKind.GENERATION)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            await _accept(queue, job_id)
    assert (await QueueStats(client).backlog(JobKind.GENERATION)).ready == 1
    await client.aclose()


def _serve(port: int, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    options = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "no"}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return subprocess.Popen([server_binary(), *words], stdout=subprocess.DEVNULL)


def _answers(client: Any) -> bool:
    try:
        return client.ping()
    except redis.ConnectionError:
        return False
