"""A env per test, in a directory of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.environment import Environment, open_environment


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Environment]:
    async with open_environment(tmp_path) as opened:
        yield opened
