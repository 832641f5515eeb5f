"""Applies the catalog file to Redis, and its changes without a restart."""

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
from serve_app.store.redis_client import RedisClient, in_parts
from serve_app.store.script import Script

_log = logging.getLogger(__name__)


ROWS_AT_ONCE, LORAS_AT_ONCE = 25, 300
"""One script writes or withdraws this many rows, or looks at the waiting jobs of this many LoRAs: some ms."""


class AppliedCatalog:
    """Applies the catalog file and reads what was applied. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._apply_catalog = Script(redis, "loras/apply_catalog")
        self._apply_rows = Script(redis, "loras/apply_rows")
        self._withdraw_moved = Script(redis, "loras/withdraw_moved")
        self._end_catalog = Script(redis, "loras/end_catalog")

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
            if not await self._redis.hget(redis_key("catalog"), "applied"):
                await self.apply_file()
        except StoreUnavailable as outage:
            _log.info("the catalog was not looked for: %s", outage.message)

    async def apply_file(self) -> Sequence[SetAside]:
        """Make the adapters of the catalog file those that the file names now; return the rows left out.

        A row that is set aside keeps what was applied of it. Registered adapters stay. Each step is short, so that
        nobody waits behind a long file; one that is cut short is done by the next call. Raises `CatalogError` for a
        file that cannot be read as a whole: then everything stays as it was applied.
        """
        catalog = await asyncio.to_thread(read_catalog, self._settings.catalog)
        known: dict[str, str] = await self._redis.hgetall(redis_key("catalog_digests"))
        adapters = list(catalog.adapters.values())
        digested = await asyncio.to_thread(add_digests, adapters, known, self._settings.storage_options)
        set_aside = [*catalog.set_aside, *digested.set_aside]
        both = {model.id: model for model in await self.applied_base_models()} | dict(catalog.base_models)
        began_after, moved = await self._apply_catalog(**_models(both.values()))
        rows = [file_row(adapter, place) for place, adapter in enumerate(digested.adapters)]
        taken = await self._apply_all(rows, kept={row.id for row in set_aside})
        await self._remember(known, digested.known)
        loras: list[str] = await self._redis.zrange(redis_key("loras"), 0, -1) if moved else []
        for part in in_parts(loras, LORAS_AT_ONCE):
            await self._withdraw_moved(moved=moved, loras=part)
        models = _models(catalog.base_models.values())
        facts = {"set_aside": json.dumps(set_aside), "taken": " ".join(taken), "began_after": began_after}
        if not await self._end_catalog(**models, **facts):
            return await self.apply_file()
        return [*set_aside, *map(_taken, taken)]

    async def _apply_all(self, rows: Sequence[Mapping[str, Any]], *, kept: AbstractSet[str]) -> list[str]:
        """Apply all rows of the file, and withdraw those that left it; return the ids that registered LoRAs have."""
        taken: list[str] = []
        for part in in_parts(rows, ROWS_AT_ONCE):
            taken += await self._apply_rows(rows=json.dumps(part), gone=[])
        applied = await self._redis.smembers(redis_key("catalog_rows"))
        for part in in_parts(sorted(applied - kept - {row["id"] for row in rows}), ROWS_AT_ONCE):
            await self._apply_rows(rows="[]", gone=part)
        return taken

    async def _remember(self, before: Mapping[str, str], digests: Mapping[str, str]) -> None:
        changed = [(uri, digest) for uri, digest in digests.items() if before.get(uri) != digest]
        for part in in_parts(changed, LORAS_AT_ONCE):
            await self._redis.hset(redis_key("catalog_digests"), mapping=dict(part))
        for gone in in_parts([*before.keys() - digests.keys()], LORAS_AT_ONCE):
            await self._redis.hdel(redis_key("catalog_digests"), *gone)

    async def set_aside(self) -> list[SetAside]:
        """Return the rows of the file that were set aside when it was applied last."""
        rows, taken = await self._redis.hmget(redis_key("catalog"), "set_aside", "taken")
        return [*(SetAside(*row) for row in json.loads(rows or "[]")), *map(_taken, (taken or "").split())]


def _models(models: Iterable[BaseModel]) -> Mapping[str, str]:
    found = list(models)
    return {
        "new_base_models": json.dumps([_row(model) for model in found]),
        "widths": json.dumps({model.id: model.widths for model in found}),
    }


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
