"""Usage of an account's completed jobs by day, API key and LoRA, as `finish.lua` counts it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from serve_app.domain.durations import MILLI
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient

UPSCALES = "upscale"
"""Upscaled images are counted under this name in place of a LoRA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Usage of one day (UTC) with one key ('' for the console) and one LoRA, several that acted together, or none.

    Work is in megapixel-steps, of upscales in megapixels of their results; `seconds` are of one worker.
    """

    day: date
    key_id: str
    lora_id: str
    images: int
    megapixel_steps: float
    seconds: float

    @property
    def lora_ids(self) -> Sequence[str]:
        """Return the ids that `lora_id` joins, as `finish.lua` does; of images without a LoRA, their base model's."""
        return self.lora_id.split("+")


_EPOCH = date(1970, 1, 1)


class UsageReader:
    """Reads counters. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def today(self) -> date:
        """Return the day that is counted on now, by the store's clock."""
        seconds, _ = await self._redis.time()
        return _EPOCH + timedelta(seconds=seconds)

    async def days(self, account_id: str, last: date, number: int) -> list[Usage]:
        """List the account's usage of `number` days, the oldest first, then by LoRA and key."""
        days = [last - timedelta(days=ago) for ago in reversed(range(number))]
        pipeline = self._redis.pipeline(transaction=False)
        for day in days:
            pipeline.hgetall(redis_key("usage", account_id, str((day - _EPOCH).days)))
        rows: list[dict[str, str]] = await pipeline.execute()
        return [usage for day, row in zip(days, rows, strict=True) for usage in _read(day, row)]


def _read(day: date, row: Mapping[str, str]) -> list[Usage]:
    """Read one day's fields: `images`, `work` (in thousandths) and `ms`, each with a key and a LoRA."""
    counted: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, value in row.items():
        what, key_id, lora_id = name.split(":", 2)
        counted[lora_id, key_id][what] = int(value)
    return [
        Usage(
            day=day,
            key_id=key_id,
            lora_id=lora_id,
            images=of.get("images", 0),
            megapixel_steps=of.get("work", 0) / MILLI,
            seconds=of.get("ms", 0) / 1000,
        )
        for (lora_id, key_id), of in sorted(counted.items())
    ]
