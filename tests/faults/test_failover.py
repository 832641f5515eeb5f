"""A lagging replica takes over from a dead primary: acknowledged jobs are there, others are refused."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobState
from serve_app.store.embedded_redis import ensure_redis
from tests.composition import open_resources
from tests.faults.environment import Environment, open_environment
from tests.faults.reconciliation import audit_service
from tests.faults.redis_proxy import RedisProxy, proxy_to
from tests.support import plain_redis, wait_until

CANCELED = [JobState.CANCELED]
BEFORE, BEHIND = range(4), range(4, 6)
"""Requests made while the replica keeps up, and once it lags."""


class Cluster:
    """A primary, which is the env's, and its replica at the far end of a proxy."""

    def __init__(self, env: Environment, proxy: RedisProxy, replica_url: str) -> None:
        self.env = env
        self.proxy = proxy
        self._replica_url = replica_url
        self._replica = plain_redis(replica_url)

    async def replicate(self) -> None:
        host, port = self.proxy.url.removeprefix("redis://").split(":")
        self._replica.replicaof(host, port)
        await wait_until(lambda: self._replica.info("replication")["master_link_status"] == "up", timeout=60)

    async def accept(self, number: int) -> bool:
        """Whether it was acknowledged."""
        try:
            await self.env.ask(seed=number, key=f"key-{number}", may_end_as=CANCELED)
        except StoreUnavailable:
            return False
        return True

    async def fail_over(self) -> list[str]:
        """What is wrong once the replica is primary, every request has been repeated and every job has ended."""
        self.env.kill_redis()
        self._replica.replicaof("no", "one")
        changes = {"redis_url": self._replica_url, "accept_replicas": 0}
        async with open_resources(self.env.settings.model_copy(update=changes)) as resources:
            for number in (*BEFORE, *BEHIND):
                await self.env.accept(
                    seed=number,
                    key=f"key-{number}",
                    may_end_as=CANCELED,
                    queue=resources.queue,
                    catalog=resources.catalog,
                )
            for job_id in self.env.acknowledged.all:
                await resources.queue.cancel(job_id, account_id=None)
            return await audit_service(resources, self.env.acknowledged)

    def close(self) -> None:
        self._replica.close()


@pytest.fixture
async def cluster(tmp_path: Path, waits_for: int) -> AsyncIterator[Cluster]:
    standby = await asyncio.to_thread(ensure_redis, tmp_path / "standby")
    try:
        async with open_environment(tmp_path, accept_replicas=waits_for) as env, proxy_to(env.redis_url) as proxy:
            opened = Cluster(env, proxy, standby.url)
            await opened.replicate()
            yield opened
            opened.close()
    finally:
        os.kill(standby.pid, signal.SIGKILL)  # it may be writing its first file, and then refuses to stop


@pytest.mark.parametrize("waits_for", [1])
async def test_a_replica_that_lags_holds_all_that_was_acknowledged(cluster: Cluster) -> None:
    cluster.proxy.slow(0.1)
    for number in BEFORE:
        await wait_until(lambda number=number: cluster.accept(number))
    cluster.proxy.blackhole()
    assert not any([await cluster.accept(number) for number in BEHIND])
    assert not await cluster.fail_over()
    assert len(set(cluster.env.acknowledged.all)) == len(BEFORE) + len(BEHIND)


@pytest.mark.parametrize("waits_for", [0])
async def test_without_waiting_for_it_the_auditor_finds_what_the_failover_lost(cluster: Cluster) -> None:
    assert all([await cluster.accept(number) for number in BEFORE])
    cluster.proxy.blackhole()
    assert all([await cluster.accept(number) for number in BEHIND])
    problems = await cluster.fail_over()
    assert sum("there is no record of it" in problem for problem in problems) >= len(BEHIND)
