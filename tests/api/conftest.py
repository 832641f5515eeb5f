"""One service for all API tests of a session.

Fresh accounts keep tests apart; the service is never emptied.
"""

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from serve_app.loras.weights import LAYER_TABLES
from tests.api.app import Member, TestService, open_service, service_settings
from tests.live import Live, live_service
from tests.support import volatile_redis

MAX_LORA_SIZE = 48 << 20


@pytest.fixture(scope="session")
async def service(tmp_path_factory: pytest.TempPathFactory, layer_tables: Path) -> AsyncIterator[TestService]:
    folder = tmp_path_factory.mktemp("service")
    (folder / LAYER_TABLES).symlink_to(layer_tables)
    async with open_service(
        folder,
        max_lora_size=MAX_LORA_SIZE,
        lora_sources=("memory://loras/",),
        lease=timedelta(hours=1),
        max_queued_per_account=100_000,
        polls_per_second=100_000,
        idempotency_life=timedelta(hours=1),
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service of its own on a port, whose worker completes every job."""
    with volatile_redis() as redis_url:
        settings = service_settings(
            tmp_path_factory.mktemp("live"),
            [],
            redis_url=redis_url,
            max_queued_per_account=100_000,
            openai_models=dict.fromkeys(("gpt-image-1", "dall-e-2", "dall-e-3"), "pocket"),
        )
        with live_service(settings) as live:
            yield live


@pytest.fixture(scope="session")
async def regular(service: TestService) -> Member:
    """An account for tests that look at one answer only."""
    return await service.member()


@pytest.fixture
async def member(service: TestService) -> Member:
    """An account of the test's own."""
    return await service.member()


@pytest.fixture
def client(service: TestService) -> httpx.AsyncClient:
    return service.client
