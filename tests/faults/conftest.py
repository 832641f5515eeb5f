"""A scene per test, in a directory of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.scene import Scene, open_scene


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with open_scene(tmp_path) as opened:
        yield opened
