"""Grants: which accounts may use an adapter, over what its record says."""

from redis.asyncio import Redis

from serve_app.stores.script import Script

ALLOW, DENY = "allow", "deny"


class AdapterGrants:
    """Decides for accounts on adapters. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis) -> None:
        self._grant_lora = Script(redis, "grant_lora")

    async def grant(self, lora_id: str, account_id: str) -> bool:
        """Allow the account the adapter, over its record; False when there is no such adapter."""
        return await self._decide(lora_id, account_id, ALLOW)

    async def revoke(self, lora_id: str, account_id: str) -> bool:
        """Deny the account the adapter, over its record; False when there is no such adapter."""
        return await self._decide(lora_id, account_id, DENY)

    async def _decide(self, lora_id: str, account_id: str, decision: str) -> bool:
        return await self._grant_lora(lora=lora_id, account=account_id, decision=decision) == 1
