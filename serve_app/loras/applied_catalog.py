"""Applies the catalog file to Redis, and its changes without a restart."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from serve_app.domain.catalog import BaseModel
from serve_app.domain.errors import StoreUnavailable
from serve_app.loras.catalog import file_row
from serve_app.loras.catalog_file import CatalogError, SetAside, add_digests, read_catalog
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

_log = logging.getLogger(__name__)


class AppliedCatalog:
    """Applies the catalog file and reads what was applied. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._apply_catalog = Script(redis, "loras/apply_catalog")

    async def base_models(self) -> list[BaseModel]:
        """Return the file's base models; while it cannot be read, those that were applied last.

        Raises `CatalogError`.
        """
        try:
            catalog = await asyncio.to_thread(read_catalog, self._settings.catalog)
        except CatalogError as error:
            if not (applied := await self.applied_base_models()):
                raise
            _log.warning("using the base models that were applied last: %s", error)
            return applied
        return list(catalog.base_models.values())

    async def applied_base_models(self) -> list[BaseModel]:
        """Return the base models as the file was applied last, without reading it."""
        applied, widths = await self._redis.hmget(redis_key("catalog"), "base_models", "widths")
        known: dict[str, Any] = json.loads(widths or "{}")
        return [BaseModel(**row, widths=known.get(row["id"], {})) for row in json.loads(applied or "[]")]

    async def apply_file_once(self) -> None:
        """Apply the catalog file where none has been: a new Redis. Raises `CatalogError`.

        While Redis is away, that is left to the next process that opens it.
        """
        try:
            if not await self._redis.exists(redis_key("catalog")):
                await self.apply_file()
        except StoreUnavailable as outage:
            _log.info("the catalog was not looked for: %s", outage.message)

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
            new_base_models=json.dumps([_row(model) for model in catalog.base_models.values()]),
            widths=json.dumps({model.id: model.widths for model in catalog.base_models.values()}),
            digests=json.dumps(digested.known),
        )
        return [*set_aside, *map(_taken, taken)]

    async def set_aside(self) -> list[SetAside]:
        """Return the rows of the file that were set aside when it was applied last."""
        rows, taken = await self._redis.hmget(redis_key("catalog"), "set_aside", "taken")
        return [*(SetAside(*row) for row in json.loads(rows or "[]")), *map(_taken, (taken or "").split())]


def _row(model: BaseModel) -> dict[str, Any]:
    """Return what is said of a base model: versions before a field was added read what does not have it.

    Widths, which scripts do not need, have a field of their own.
    """
    return {name: value for name, value in asdict(model).items() if value not in (None, "") and name != "widths"}


def _taken(lora_id: str) -> SetAside:
    return SetAside(lora_id, f"adapter {lora_id}: a LoRA with this id is registered")


AGAIN_AFTER = timedelta(minutes=1)
"""How soon rows that are set aside are tried again with the same file: their weights may be there now."""
Version = tuple[int, int, int] | None


class CatalogFollower:
    """Applies the catalog file when it has changed, and logs each error once."""

    def __init__(self, catalog: AppliedCatalog, file: Path, *, again_after: timedelta = AGAIN_AFTER) -> None:
        self._catalog, self._file, self._again_after = catalog, file, again_after.total_seconds()
        self._applied: Version = None
        self._logged: Sequence[str] = ()
        self._again = 0.0

    async def look(self) -> None:
        """Apply the file unless it is the one that was applied. Raises `StoreUnavailable`: look again."""
        version = await asyncio.to_thread(_version, self._file)
        if version == self._applied and time.monotonic() < self._again:
            return
        try:
            set_aside = await self._catalog.apply_file()
        except CatalogError as error:
            set_aside = [SetAside("", f"{error}: what was applied before stays")]
        mistakes = [row.reason for row in set_aside]
        for mistake in mistakes:
            if mistake not in self._logged:
                _log.error("catalog: set aside: %s", mistake)
        self._logged = mistakes
        self._applied = version
        self._again = time.monotonic() + self._again_after if set_aside else float("inf")


def _version(path: Path) -> Version:
    """Return the file's version, which changes with it; None while it cannot be found."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
