"""Registered LoRA adapters, which are in no catalog file: adding, changing, removing."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from redis.asyncio import Redis

from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import milliseconds
from serve_app.settings import Settings
from serve_app.stores.lora_records import REGISTERED, order_of, write_record
from serve_app.stores.script import Script


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


class AdapterRegistry:
    """Changes the registered adapters. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._settings = settings
        self._register_lora = Script(redis, "register_lora")
        self._update_lora = Script(redis, "update_lora")
        self._remove_lora = Script(redis, "remove_lora")

    async def register(self, adapter: Adapter) -> bool:
        """Add an adapter that is in no file; False when its id is in use."""
        return (await self.register_under(adapter, None)).status == "added"

    async def register_under(self, adapter: Adapter, terms: Terms | None, *, asks: bool = False) -> Registration:
        """Add an adapter that is in no file, if the owner's terms allow it.

        With `asks`, only say whether they do.
        """
        key = terms.idempotency_key if terms else None
        answer = await self._register_lora(
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
        return await self._update_lora(lora=lora_id, owner=account_id, fields=json.dumps(dict(fields))) == 1

    async def remove(self, lora_id: str) -> Removal:
        """Remove a registered adapter and its grants."""
        return Removal(*await self._remove_lora(lora=lora_id))
