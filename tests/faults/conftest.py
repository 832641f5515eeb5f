"""A service without Ray for each test in a directory of its own, and the whole service as a process."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from serve_app.store.embedded_redis import stop_redis
from tests.faults.environment import Environment, open_environment
from tests.faults.service import Service


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Environment]:
    async with open_environment(tmp_path) as opened:
        yield opened


@pytest.fixture
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    """`atelier up` with two ingresses and generators, or as many as the test asks for, not started yet."""
    replicas: int = getattr(request, "param", 2)
    folder = Path(mkdtemp(prefix="faults-", dir="/tmp"))  # short: sockets live below it
    running = Service(folder, generators=replicas, ingresses=replicas)
    try:
        yield running
    finally:
        await running.stop()
        stop_redis(running.data_dir)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(running.runtime_home, ignore_errors=True)
