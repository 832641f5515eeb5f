"""The catalog: the file's content, and the grants and denials that operators add."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.settings import Settings
from serve_app.stores.catalog_file import read_catalog
from serve_app.stores.redis_keys import redis_key

ALLOW, DENY = "allow", "deny"


class CatalogStore:
    """Base models and adapters, and who may use them. The file is read once; `reload()` reads it again."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = cast(Any, redis)
        self._settings = settings
        self.reload()

    def reload(self) -> None:
        """Read the file again, all or nothing. Raises `CatalogError`."""
        self._catalog = read_catalog(self._settings.catalog, self._settings.storage_options)

    def base_models(self) -> list[BaseModel]:
        return list(self._catalog.base_models.values())

    def all(self) -> list[Adapter]:
        """List every adapter; for operators and replicas."""
        return list(self._catalog.adapters.values())

    def adapter(self, lora_id: str) -> Adapter | None:
        return self._catalog.adapters.get(lora_id)

    async def adapters(self, account_id: str) -> list[Adapter]:
        """List the adapters that the account may use, in the file's order."""
        names, grants = await self._names_and_grants(account_id)
        return [adapter for adapter in self.all() if _may_use(adapter, names, grants)]

    async def grant(self, lora_id: str, account_id: str) -> bool:
        """Allow the account the adapter, over the file; False when there is no such adapter."""
        return await self._decide(lora_id, account_id, ALLOW)

    async def revoke(self, lora_id: str, account_id: str) -> bool:
        """Deny the account the adapter, over the file; False when there is no such adapter."""
        return await self._decide(lora_id, account_id, DENY)

    async def _decide(self, lora_id: str, account_id: str, decision: str) -> bool:
        if self.adapter(lora_id) is None:
            return False
        await self._redis.hset(redis_key("grants", account_id), lora_id, decision)
        return True

    async def _names_and_grants(self, account_id: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the names by which the file may list the account, and its grants."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hget(redis_key("account", account_id), "name")
        pipeline.hgetall(redis_key("grants", account_id))
        name, grants = await pipeline.execute()
        return (account_id, name or ""), grants


def _may_use(adapter: Adapter, names: Sequence[str], grants: Mapping[str, str]) -> bool:
    """Decide as `accept.lua` does for a job."""
    grant = grants.get(adapter.id)
    return adapter.is_open_to(*names) if grant is None else grant == ALLOW
