"""One real service for all tests of the roof: a Ray runtime takes half a minute to start and 1.3 GB."""

import shutil
from collections.abc import Iterator

import pytest

from deployments.runtime import runtime_home
from tests.deployments.service import Service


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("service"))
    try:
        running.start()
        yield running
    finally:
        running.end()
        shutil.rmtree(runtime_home(running.data_dir))
