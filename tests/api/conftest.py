"""One house for all API tests of a session; tests are kept apart by fresh accounts, not by emptying it."""

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest

from serve_app.stores.embedded import stop_redis
from tests.api.house import House, Member, house_settings, open_house


@pytest.fixture(scope="session")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    settings = house_settings(
        tmp_path_factory.mktemp("house"),
        [],
        lease=timedelta(hours=1),
        max_queued_per_account=100_000,
        idempotency_life=timedelta(hours=1),
    )
    async with open_house(settings) as opened:
        yield opened
    stop_redis(settings.data_dir)


@pytest.fixture(scope="session")
async def regular(house: House) -> Member:
    """An account for tests that look at one answer only."""
    return await house.member()


@pytest.fixture
async def member(house: House) -> Member:
    """An account of the test's own."""
    return await house.member()


@pytest.fixture
def client(house: House) -> httpx.AsyncClient:
    return house.client
