"""Fixtures of every test: a real Redis on a private socket, settings, opened stores."""

import asyncio
import fcntl
import gc
import os
import shutil
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from deployments.runtime import runtime_home
from serve_app.http_server import THRESHOLDS
from serve_app.loras.weights import LAYER_TABLES
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.deployments.service import Service
from tests.live import Live, live_service
from tests.support import POCKET, end_tasks, plain_redis, volatile_redis, write_catalog

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin while other processes need the cores
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker for each core; for `auto` one more.

    The tests with a Ray runtime mostly wait for other processes. They are one group: Ray and Serve give up what does
    not start within limits of theirs, which two at a time met while other tests ran.
    """
    return (os.cpu_count() or 1) + (config.option.numprocesses == "auto")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests with a Ray of their own before those that share a service, and last the test that ends it."""

    def order(item: pytest.Item) -> int:
        return sum(name in getattr(item, "fixturenames", ()) for name in ("started_service", "dying"))

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what is imported and collected from garbage collection, meanwhile and later, as a server's start does.

    A full one took up to 1.5 s of a running test, and all of them a tenth of the processor time of the tests of pages.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _passwords_cost_little() -> Iterator[None]:
    """A hash as it is shipped takes 47 ms of a core, and the console's tests sign in hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.accounts.sign_in.MEMORY_KIB", 256)
        yield


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The session's Redis server. It is shared: use `redis_db` to start from nothing."""
    with volatile_redis() as url:
        yield url


@pytest.fixture
def redis_db(redis_url: str) -> Iterator[redis.Redis]:
    """The session's server, emptied, through a plain blocking client."""
    with plain_redis(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture
def live(settings: Settings, redis_db: redis.Redis) -> Iterator[Live]:
    """The application on a port, with a worker that ends each job as the test says."""
    with live_service(settings) as service:
        yield service


@pytest.fixture
def pocket() -> Path:
    """The folder of the bundled pocket model."""
    return POCKET


@pytest.fixture(scope="session")
def layer_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where all workers' tests keep the layer tables of base models.

    A process of its own takes 5 s for the bundled model's, and the first worker that asks 1 s: it has the libraries.
    """
    from serve_app.engine.families.outlines import outlined_table

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "layer_tables"
    folder.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outlined_table(POCKET, folder)
    return folder


@pytest.fixture
def shared_layer_tables(settings: Settings, layer_tables: Path) -> None:
    """Have the service of `settings` check adapters against layer tables that exist."""
    settings.data_dir.mkdir(exist_ok=True)
    (settings.data_dir / LAYER_TABLES).symlink_to(layer_tables)


@pytest.fixture
def settings(tmp_path: Path, redis_url: str, redis_db: redis.Redis) -> Settings:
    """Settings of a service in a temporary directory over an empty Redis, with the test catalog."""
    return Settings(data_dir=tmp_path / "var", redis_url=redis_url, catalog=write_catalog(tmp_path / "catalog"))


@pytest.fixture
async def resources(settings: Settings, redis_db: redis.Redis) -> AsyncIterator[Resources]:
    """Opened stores over an empty Redis. No task that the test left running reaches the next test."""
    async with open_resources(settings) as opened:
        before = asyncio.all_tasks()
        yield opened
        await end_tasks(asyncio.all_tasks() - before - {asyncio.current_task()})


@pytest.fixture
async def other(settings: Settings, resources: Resources) -> AsyncIterator[Resources]:
    """The stores of another process over the same Redis."""
    async with open_resources(settings) as opened:
        yield opened


@pytest.fixture(scope="session")
def started_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One `atelier up` for all tests that need it: a Ray runtime takes half a minute to start and 1.3 GB."""
    running = Service(tmp_path_factory.mktemp("service"))
    try:
        running.start()
        yield running
    finally:
        running.end()
        shutil.rmtree(runtime_home(running.data_dir))


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """moto's server, and the storage options that reach it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options: dict[str, Any] = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}"},
    }
    import s3fs

    s3fs.S3FileSystem(**options).mkdir("pictures")
    yield options
    server.stop()
