"""What the tests themselves stand on."""

import asyncio
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
