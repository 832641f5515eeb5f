"""Redis is frozen under load, its disk full or not: nothing is lost, and nothing is left at the end.

`.venv/bin/python -m pytest -m soak -n 0 -s --timeout 1500 tests/faults/test_frozen_redis.py` prints a report for each.
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import mkdtemp

import httpx
import pytest
import yaml

from deployments.runtime import processes_in, runtime_home
from serve_app.settings import Settings
from serve_app.store.embedded_redis import stop_redis
from serve_app.store.redis_process import server_process
from tests import processes
from tests.attack.serve_run import ServeRun
from tests.composition import open_resources
from tests.faults.load import Callers, say
from tests.faults.reconciliation import audit_service
from tests.faults.service import PLANS, Service
from tests.support import existing, mounted_disk, wait_until

FREEZES_S = (5, 20, 60)
"""The longest is beyond what a silent server is waited for."""
DISK_MB = 64
SETTLE_LIMIT_S = 300.0
STOP_LIMIT_S = {"up": 15.0, "serve run": 60.0}
"""What `up` promises; after the end of `serve run`, a program waits 30 s for a server that does not answer."""
SERVE_STOP_LIMIT_S = 150.0
"""Serve waits up to 30 s for its controller, which waits up to 20 s for each replica, beside whatever else runs."""


class Running:
    """A service that was started in one of the two ways, and what its Redis did."""

    def __init__(self, way: str, folder: Path) -> None:
        self.way = way
        self.most_servers = 0
        self._service = Service(folder) if way == "up" else ServeRun(folder)
        self.data_dir = self._service.data_dir
        self.redis = self.data_dir / "redis"
        self.settings = Settings.model_validate({"data_dir": self.data_dir, "plans": os.environ["ATELIER_PLANS"]})
        self.base_url = f"http://127.0.0.1:{self._service.port}"

    async def start(self) -> None:
        if isinstance(self._service, Service):
            await self._service.start()
        else:
            await asyncio.to_thread(self._service.start)

    async def stop(self) -> float:
        """Stop it; return for how many seconds Redis was left.

        After `serve run` they count from the end of that process.
        """
        began = time.monotonic()
        if isinstance(self._service, Service):
            await self._service.stop()
        else:
            process = self._service.process
            process.send_signal(signal.SIGTERM)  # a shell lets what it starts in the background ignore SIGINT
            await wait_until(lambda: process.poll() is not None, timeout=SERVE_STOP_LIMIT_S)
            began = time.monotonic()
        await wait_until(lambda: not self.servers(), timeout=STOP_LIMIT_S["serve run"])
        return time.monotonic() - began

    def servers(self) -> list[int]:
        """The servers in the data directory, by their program: a frozen one does not answer."""
        return [pid for pid in processes_in(self.redis) if processes.program(pid).endswith("-server")]

    async def freeze(self, seconds: float) -> None:
        """Freeze the server for `seconds`, and count the servers meanwhile."""
        pid = existing(server_process(self.redis))
        os.kill(pid, signal.SIGSTOP)
        thaw_at = time.monotonic() + seconds
        while time.monotonic() < thaw_at:
            self.most_servers = max(self.most_servers, len(self.servers()))
            await asyncio.sleep(0.05)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def end(self) -> None:
        if isinstance(self._service, Service):
            await self._service.stop()
        else:
            await asyncio.to_thread(self._service.end)
        stop_redis(self.data_dir)
        shutil.rmtree(runtime_home(self.data_dir), ignore_errors=True)


@contextmanager
def filled(disk: Path) -> Generator[None]:
    """Leave no byte free on a disk."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    assert shutil.disk_usage(disk).free == 0
    try:
        yield
    finally:
        ballast.unlink()


@pytest.fixture(params=["up", "serve run"])
async def running(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    folder = Path(mkdtemp(prefix="frozen-", dir="/tmp"))  # short: sockets live below it
    plans = folder / "plans.yaml"
    plans.write_text(yaml.safe_dump(PLANS))
    monkeypatch.setenv("ATELIER_PLANS", str(plans))
    monkeypatch.setenv("ATELIER_DISK_RESERVE", "0")
    monkeypatch.setenv("ATELIER_POLLS_PER_SECOND", "10000")  # a poll beyond the limit would tell nothing of its job
    try:
        yield (opened := Running(request.param, folder))
        await opened.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["a disk with space", "a full disk"])
async def disk(request: pytest.FixtureRequest, running: Running) -> AsyncIterator[Path | None]:
    """The disk that is to be filled: that of Redis alone, so that images can be stored."""
    if request.param == "a disk with space":
        yield None
        return
    running.data_dir.mkdir(exist_ok=True)
    with mounted_disk(running.redis, megabytes=DISK_MB) as small:
        yield small
        await running.end()  # before the disk is taken away, with which its Redis would go out of sight


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(1500)
async def test_nothing_is_lost_and_nothing_left_while_redis_is_frozen(running: Running, disk: Path | None) -> None:
    await running.start()
    callers = await Callers.of(running.settings, running.base_url)
    calling = asyncio.create_task(callers.run())
    accepting_after_s: dict[int, float] = {}
    try:
        for seconds in FREEZES_S:
            accepted = len(callers.acknowledged.all)
            await wait_until(lambda accepted=accepted: len(callers.acknowledged.all) > accepted + 5, timeout=120)
            with filled(disk) if disk else nullcontext():
                server = server_process(running.redis)
                await running.freeze(seconds)
                if disk:  # it ends at its first write
                    await wait_until(lambda server=server: server_process(running.redis) != server)
            accepting_after_s[seconds] = round(await callers.probe(), 1)
        callers.stop.set()
        await asyncio.wait({calling}, timeout=SETTLE_LIMIT_S)
    finally:
        calling.cancel()
    unknown = await _unknown(running.base_url, callers.headers["b"], callers.acknowledged.all)
    server = existing(server_process(running.redis))
    os.kill(server, signal.SIGSTOP)
    stopped_s = await running.stop()
    async with open_resources(running.settings) as resources:
        problems = await audit_service(resources, callers.acknowledged)
    report = {
        "way": running.way,
        "full disk": disk is not None,
        "accepted": len(callers.acknowledged.all),
        "most servers at once": running.most_servers,
        "accepting_after_s": accepting_after_s,
        "answers": dict(callers.seen.answers),
        "unknown": unknown,
        "stopped_s": round(stopped_s, 1),
        "problems": problems,
    }
    say("\n" + json.dumps(report, indent=2) + "\n")
    assert not problems
    assert not unknown
    assert not callers.seen.surprises
    assert not callers.seen.not_ours
    assert not callers.seen.double
    assert running.most_servers == 1
    assert stopped_s < STOP_LIMIT_S[running.way]


async def _unknown(base_url: str, headers: dict[str, str], job_ids: list[str]) -> list[str]:
    """Return the accepted jobs that the service does not know."""
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=30) as client:
        statuses = {job_id: (await client.get(f"/v1/jobs/{job_id}")).status_code for job_id in job_ids}
    return [job_id for job_id, status in statuses.items() if status != 200]
