"""Changes of registered LoRA adapters, which are in no catalog file, and grants of any to accounts."""

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from serve_app.domain.catalog import Adapter, Terms
from serve_app.domain.durations import milliseconds
from serve_app.loras.catalog import REGISTERED, order_of, write_record
from serve_app.settings import Settings
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script


class AdapterGrants:
    """Allows or denies accounts an adapter, whatever its record says. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._grant_lora = Script(redis, "loras/grant_lora")

    async def grant(self, lora_id: str, account_id: str) -> bool:
        """Allow the account the adapter; False when there is no such adapter."""
        return await self._grant_lora(lora=lora_id, account=account_id, decision="allow") == 1

    async def revoke(self, lora_id: str, account_id: str) -> bool:
        """Deny the account the adapter; False when there is no such adapter."""
        return await self._grant_lora(lora=lora_id, account=account_id, decision="deny") == 1


class Removal(NamedTuple):
    """The result of removing an adapter: `removed`, `unknown`, or `file` for one of the catalog file.

    `weights` are the stored weights that no other adapter has.
    """

    status: str
    weights: str


class Registration(NamedTuple):
    """The result of registering an adapter, and the id of the adapter that there is.

    `added`, `taken` (an id in use), `replayed`, `conflict`, `same`, `too_many` or `too_large`.
    """

    status: str
    lora_id: str


class AdapterRegistry:
    """Changes the registered adapters. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._settings = settings
        self._register_lora = Script(redis, "loras/register_lora")
        self._update_lora = Script(redis, "loras/update_lora")
        self._remove_lora = Script(redis, "loras/remove_lora")

    async def register(self, adapter: Adapter, terms: Terms | None = None, *, asks: bool = False) -> Registration:
        """Add an adapter if the owner's terms, where there are any, allow it; with `asks`, only say whether they do."""
        key = terms.idempotency_key if terms else None
        answer = await self._register_lora(
            lora=adapter.id,
            order=order_of(adapter),
            record=json.dumps(write_record(adapter, REGISTERED)),
            asks=asks,
            max_loras=terms.max_loras if terms else None,
            max_bytes=terms.max_bytes if terms else None,
            idempotency_digest="" if key is None else hashlib.sha256(key.encode()).hexdigest(),
            given_digest=terms.body.given if terms else "",
            body_digest=terms.body.before if terms else "",
            idempotency_ms=milliseconds(self._settings.idempotency_life),
        )
        return Registration(*answer)

    async def update(self, lora_id: str, account_id: str, fields: Mapping[str, str]) -> bool:
        """Change the named fields of a registered adapter's record; False when it is not the account's."""
        return await self._update_lora(lora=lora_id, owner=account_id, fields=json.dumps(dict(fields))) == 1

    async def remove(self, lora_id: str) -> Removal:
        """Remove a registered adapter and its grants."""
        return Removal(*await self._remove_lora(lora=lora_id))
