"""Waiting ends, and xdist knows groups of tests: all tests stand on both."""

import asyncio
import os
from contextlib import suppress

import pytest

from tests.support import wait_until


async def test_waiting_ends_though_the_cancel_was_swallowed() -> None:
    async def swallows() -> bool:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return False

    with pytest.raises(TimeoutError):
        await wait_until(swallows, timeout=0.1)


@pytest.mark.xdist_group("one worker")
def test_groups_of_tests_are_known_to_xdist(request: pytest.FixtureRequest) -> None:
    """Under pytest 9.2, xdist 3.8 spread them over all workers without a message, with three Ray runtimes."""
    is_grouped = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@one worker") == is_grouped
