"""The catalog file as it is applied to Redis: its adapters, base models and rows left out."""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.catalog import BaseModel
from serve_app.settings import Settings
from serve_app.stores.catalog_digests import add_digests
from serve_app.stores.catalog_file import CatalogError, SetAside, read_catalog
from serve_app.stores.lora_records import file_row
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Script

_log = logging.getLogger(__name__)


class AppliedCatalog:
    """Applies the catalog file and reads what was applied. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = cast(Any, redis)
        self._settings = settings
        self._apply_catalog = Script(redis, "apply_catalog")

    async def base_models(self) -> list[BaseModel]:
        """Return the file's base models; while it cannot be read, those that were applied last.

        Raises `CatalogError`.
        """
        try:
            catalog = await asyncio.to_thread(read_catalog, self._settings.catalog)
        except CatalogError as error:
            applied: str | None = await self._redis.hget(redis_key("catalog"), "base_models")
            if applied is None:
                raise
            _log.warning("using the base models that were applied last: %s", error)
            return [BaseModel(**row) for row in json.loads(applied)]
        return list(catalog.base_models.values())

    async def applied_base_models(self) -> list[BaseModel]:
        """The base models as the file was applied last; does not read the file."""
        applied: str | None = await self._redis.hget(redis_key("catalog"), "base_models")
        return [BaseModel(**row) for row in json.loads(applied or "[]")]

    async def apply_file_once(self) -> None:
        """Apply the catalog file where none has been: a new Redis. Raises `CatalogError`."""
        if not await self._redis.exists(redis_key("catalog")):
            await self.apply_file()

    async def apply_file(self) -> Sequence[SetAside]:
        """Make the adapters of the catalog file those that the file names now; return the rows left out.

        A row that is set aside keeps what was applied of it. Registered adapters stay. Raises `CatalogError` for a file
        that cannot be read as a whole: then everything stays as it was applied.
        """
        catalog = await asyncio.to_thread(read_catalog, self._settings.catalog)
        known: dict[str, str] = await self._redis.hgetall(redis_key("catalog_digests"))
        adapters = list(catalog.adapters.values())
        digested = await asyncio.to_thread(add_digests, adapters, known, self._settings.storage_options)
        set_aside = [*catalog.set_aside, *digested.set_aside]
        taken: list[str] = await self._apply_catalog(
            rows=json.dumps([file_row(adapter, place) for place, adapter in enumerate(digested.adapters)]),
            kept=json.dumps([row.id for row in set_aside if row.id]),
            set_aside=json.dumps(set_aside),
            base_models=json.dumps([asdict(model) for model in catalog.base_models.values()]),
            digests=json.dumps(digested.known),
        )
        return [*set_aside, *map(_taken, taken)]

    async def set_aside(self) -> list[SetAside]:
        """The rows of the file that were set aside when it was applied last."""
        rows, taken = await self._redis.hmget(redis_key("catalog"), "set_aside", "taken")
        return [*(SetAside(*row) for row in json.loads(rows or "[]")), *map(_taken, (taken or "").split())]


def _taken(lora_id: str) -> SetAside:
    return SetAside(lora_id, f"adapter {lora_id}: a LoRA with this id is registered")
