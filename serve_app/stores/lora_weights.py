"""Lists the stored weights of LoRAs that may be removed: no LoRA has them, and none is about to."""

from datetime import timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.durations import milliseconds
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Script

HOLD_LIFE = timedelta(hours=1)
"""Of a registration that was killed; storing takes minutes at the most."""
REMOVAL_LIFE = timedelta(minutes=2)
"""Of a removal that was killed; a storage call ends after 30 s."""
_AT_ONCE = 100


class LoraWeights:
    """The list of weights to remove.

    Only what was put on it is ever removed: an empty Redis removes nothing.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)
        self._hold = Script(redis, "hold_weights")
        self._release = Script(redis, "release_weights")
        self._due = Script(redis, "due_weights")

    async def hold(self, uri: str, token: str, *, life: timedelta = HOLD_LIFE) -> bool:
        """Keep the weights until `release`; False while they are being removed: ask again."""
        return await self._hold(uri=uri, token=token, life_ms=milliseconds(life)) == 1

    async def release(self, uri: str, token: str) -> None:
        """End a hold; what no LoRA has is due at once."""
        await self._release(uri=uri, token=token)

    async def due(self) -> list[str]:
        """Return the URIs that the caller has to remove; they are due again until `gone`."""
        return await self._due(life_ms=milliseconds(REMOVAL_LIFE), limit=_AT_ONCE)

    async def gone(self, uri: str) -> None:
        """Take removed weights off the list."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.zrem(redis_key("loras_unused"), uri)
        pipeline.zrem(redis_key("loras_removing"), uri)
        await pipeline.execute()
