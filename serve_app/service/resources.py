"""What every verb and door works with: the stores, opened once per process."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import JobKind
from serve_app.settings import Settings
from serve_app.stores.accounts import AccountStore
from serve_app.stores.catalog import CatalogStore
from serve_app.stores.embedded import ensure_redis
from serve_app.stores.images import ImageStore
from serve_app.stores.jobs import JobStore
from serve_app.stores.redis import connect
from serve_app.stores.sessions import SessionStore
from serve_app.stores.throttle import Throttle
from serve_app.stores.weights import WeightStore

_log = logging.getLogger(__name__)

Hint = Callable[[JobKind, str], Awaitable[None]]
"""Told the kind and id of each accepted job, so that an idle replica starts at once. It may be lost, late or refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The stores of one service. `redis_url` is where Redis really is, the embedded one included."""

    settings: Settings
    redis_url: str
    jobs: JobStore
    accounts: AccountStore
    sessions: SessionStore
    throttle: Throttle
    catalog: CatalogStore
    images: ImageStore
    weights: WeightStore
    hint: Hint | None = None
    background: set[asyncio.Task[Any]] = field(default_factory=lambda: set[asyncio.Task[Any]]())

    def keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that must outlive its caller, such as a request whose client hung up; closing waits for it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self._forget)
        return task

    async def revive(self) -> None:
        """Bring the embedded Redis back if it is ours to keep; a server named by the settings is somebody else's."""
        if not self.settings.redis_url:
            await asyncio.to_thread(ensure_redis, self.settings.data_dir)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AtelierError):  # a refusal is the caller's to hear
            _log.warning("background work ended with %s", type(error).__name__)


@asynccontextmanager
async def open_resources(settings: Settings, *, hint: Hint | None = None) -> AsyncGenerator[Resources]:
    """The stores, with the embedded Redis started when the settings name none. Raises `StoreUnavailable`, `CatalogError`."""
    redis_url = settings.redis_url or (await asyncio.to_thread(ensure_redis, settings.data_dir)).url
    client = connect(redis_url)
    try:
        resources = Resources(
            settings=settings,
            redis_url=redis_url,
            jobs=JobStore(client, settings),
            accounts=AccountStore(client, settings),
            sessions=SessionStore(client, settings),
            throttle=Throttle(client),
            catalog=await asyncio.to_thread(CatalogStore, client, settings),
            images=ImageStore(settings),
            weights=WeightStore(settings),
            hint=hint,
        )
        try:
            yield resources
        finally:
            await asyncio.gather(*resources.background, return_exceptions=True)
    finally:
        await client.aclose()
