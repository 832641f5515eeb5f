"""The catalog: LoRA adapters in Redis, who may use them, and the catalog file that seeds it.

What one process changes, every other serves with its next request: lists that a process keeps are those of a revision.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self, cast

from redis.asyncio import Redis

from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.domain.durations import epoch_ms, milliseconds
from serve_app.settings import Settings
from serve_app.stores.catalog_digests import add_digests
from serve_app.stores.catalog_file import CatalogError, SetAside, read_catalog
from serve_app.stores.lora_records import REGISTERED, file_row, order_of, read_record, write_record
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Script

_log = logging.getLogger(__name__)

ALLOW, DENY = "allow", "deny"
_AT_ONCE = 500
"""Records read in one round trip."""
LISTED_S = 60.0
"""A process of an earlier version changes LoRAs without a new revision, during a roll."""
MOST_LISTED = 32
"""Accounts whose lists a process keeps: a thousand LoRAs take 2 MB."""


class Removal(NamedTuple):
    """The result of removing an adapter: `removed`, `unknown`, or `file` for one of the catalog file.

    `weights` are the stored weights that no other adapter has.
    """

    status: str
    weights: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an account that registers a LoRA by itself is held to."""

    max_loras: int
    max_bytes: int
    idempotency_key: str | None = None
    body_sha256: str = ""


class Registration(NamedTuple):
    """The result of registering an adapter, and the id of the adapter that there is.

    `added`, `taken` (an id in use), `replayed`, `conflict`, `same`, `too_many` or `too_large`.
    """

    status: str
    lora_id: str


class SharedAdapter(NamedTuple):
    """An adapter that an account owns or may use.

    `shared_with`: for its owner, the accounts that may use it too, by id, with their names.
    """

    adapter: Adapter
    shared_with: Mapping[str, str]


class Position(NamedTuple):
    """An adapter's position in a list by creation; the newest is the greatest."""

    created_ms: int
    lora_id: str

    @classmethod
    def of(cls, adapter: Adapter) -> Self:
        return cls(epoch_ms(adapter.created_at), adapter.id)


class _Listed(NamedTuple):
    """What an account could use at a revision of all LoRAs, and until when that is believed."""

    revision: int
    ends: float
    adapters: tuple[Adapter, ...]


class CatalogStore:
    """Stores LoRA adapters, grants and denials.

    Base models stay in the file, which replicas read when they start.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = cast(Any, redis)
        self._settings = settings
        names = (
            "apply_catalog",
            "register_lora",
            "remove_lora",
            "grant_lora",
            "list_loras",
            "page_loras",
            "read_lora",
            "update_lora",
        )
        self._scripts = {name: Script(redis, name) for name in names}
        self._listed: dict[str, _Listed] = {}

    async def adapter(self, lora_id: str) -> Adapter | None:
        fields: dict[str, str] = await self._redis.hgetall(redis_key("lora", lora_id))
        return read_record(lora_id, fields) if fields else None

    async def adapters(self, account_id: str, *, limit: int | None = None) -> list[Adapter]:
        """List the adapters that the account may use, oldest first.

        Reads as many records as it lists, and next to none where nothing has changed since the last call.
        """
        last = self._listed.get(account_id) if limit is None else None
        known = last.revision if last is not None and time.monotonic() < last.ends else None
        revision, *answer = await self._scripts["list_loras"](account=account_id, most=limit, known=known)
        if last is not None and not answer:
            return list(last.adapters)
        found = [read_record(lora_id, _fields(flat)) for lora_id, flat in answer[0]]
        if limit is None:
            self._listed.pop(account_id, None)
            self._listed[account_id] = _Listed(revision, time.monotonic() + LISTED_S, tuple(found))
            while len(self._listed) > MOST_LISTED:
                self._listed.pop(next(iter(self._listed)))
        return found

    async def newest(self, account_id: str, *, limit: int, before: Position | None = None) -> list[Adapter]:
        """Lists the newest adapters that the account may use; costs by `limit`.

        Those of one time are listed by id, the last first. `before`: only those behind this one.
        """
        created_ms, lora_id = before or (None, None)
        answer = await self._scripts["page_loras"](
            account=account_id, most=limit, before_ms=created_ms, before_id=lora_id
        )
        return [read_record(lora_id, _fields(flat)) for lora_id, flat in answer]

    async def adapter_of(self, lora_id: str, account_id: str) -> SharedAdapter | None:
        """The adapter, if the account owns it or may use it."""
        answer = await self._scripts["read_lora"](lora=lora_id, account=account_id)
        if not answer:
            return None
        return SharedAdapter(read_record(lora_id, _fields(answer[0])), dict(answer[1]))

    async def all(self) -> list[Adapter]:
        """List every adapter, oldest first; for operators."""
        ids: list[str] = await self._redis.zrange(redis_key("loras"), 0, -1)
        found: list[Adapter] = []
        for start in range(0, len(ids), _AT_ONCE):
            found += await self._read(ids[start : start + _AT_ONCE])
        return found

    async def open_adapter_id(self) -> str | None:
        """The oldest adapter that everyone may use, for examples."""
        ids: list[str] = await self._redis.zrange(redis_key("loras_open"), 0, 0)
        return ids[0] if ids else None

    async def grant(self, lora_id: str, account_id: str) -> bool:
        """Allow the account the adapter, over its record; False when there is no such adapter."""
        return await self._decide(lora_id, account_id, ALLOW)

    async def revoke(self, lora_id: str, account_id: str) -> bool:
        """Deny the account the adapter, over its record; False when there is no such adapter."""
        return await self._decide(lora_id, account_id, DENY)

    async def register(self, adapter: Adapter) -> bool:
        """Add an adapter that is in no file; False when its id is in use."""
        return (await self.register_under(adapter, None)).status == "added"

    async def register_under(self, adapter: Adapter, terms: Terms | None, *, asks: bool = False) -> Registration:
        """Add an adapter that is in no file, if the owner's terms allow it.

        With `asks`, only say whether they do.
        """
        key = terms.idempotency_key if terms else None
        answer = await self._scripts["register_lora"](
            lora=adapter.id,
            order=order_of(adapter),
            record=json.dumps(write_record(adapter, REGISTERED)),
            asks=asks,
            max_loras=terms.max_loras if terms else None,
            max_bytes=terms.max_bytes if terms else None,
            idempotency_digest="" if key is None else hashlib.sha256(key.encode()).hexdigest(),
            body_digest=terms.body_sha256 if terms else "",
            idempotency_ms=milliseconds(self._settings.idempotency_life),
        )
        return Registration(*answer)

    async def update(self, lora_id: str, account_id: str, fields: Mapping[str, str]) -> bool:
        """Change the named fields of a registered adapter's record; False when it is not the account's."""
        return await self._scripts["update_lora"](lora=lora_id, owner=account_id, fields=json.dumps(dict(fields))) == 1

    async def remove(self, lora_id: str) -> Removal:
        """Remove a registered adapter and its grants."""
        return Removal(*await self._scripts["remove_lora"](lora=lora_id))

    async def owned_ids(self, account_id: str) -> list[str]:
        """The adapters that the account owns."""
        return await self._redis.zrange(redis_key("loras_owned", account_id), 0, -1)

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
        taken: list[str] = await self._scripts["apply_catalog"](
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

    async def _decide(self, lora_id: str, account_id: str, decision: str) -> bool:
        return await self._scripts["grant_lora"](lora=lora_id, account=account_id, decision=decision) == 1

    async def _read(self, ids: Sequence[str]) -> list[Adapter]:
        pipeline = self._redis.pipeline(transaction=False)
        for lora_id in ids:
            pipeline.hgetall(redis_key("lora", lora_id))
        records: list[dict[str, str]] = await pipeline.execute()
        return [read_record(lora_id, record) for lora_id, record in zip(ids, records, strict=True) if record]


def _fields(flat: Sequence[str]) -> Mapping[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _taken(lora_id: str) -> SetAside:
    return SetAside(lora_id, f"adapter {lora_id}: a LoRA with this id is registered")
