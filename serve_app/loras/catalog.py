"""The LoRA adapters in Redis: their records, which of them an account may use, and changes of registered ones.

What one process changes, every other serves with its next request: lists that a process keeps are those of a revision.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from serve_app.domain import guidance
from serve_app.domain.catalog import Adapter, Terms
from serve_app.domain.durations import Position, epoch_ms, from_epoch_ms, milliseconds
from serve_app.domain.samplers import passes_of
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, read_records
from serve_app.store.script import Script, pairs

FROM_FILE, REGISTERED = "file", "registered"
ROWS_AT_ONE_TIME = 1_000
AS_THEY_ARE = ("name", "description", "file", "sha256", "base_model", "owner")
"""The texts of an adapter that its record holds under their own names."""
RANK_OF_A_LAYER = 640
"""A LoRA of this rank would cost as much as a layer of 1,280 inputs and outputs itself: r·(in + out) = in·out."""


def order_of(adapter: Adapter, place: int = 0) -> str:
    """Return its place in lists: by creation, and rows of one millisecond by their `place` in the catalog file."""
    return str(epoch_ms(adapter.created_at) * ROWS_AT_ONE_TIME + min(place, ROWS_AT_ONE_TIME - 1))


def added_cost(adapter: Adapter, *, free: int) -> float:
    """Return by what share the LoRA makes a pass longer: by its rank beyond `free`, or by that of a LoRA as slow.

    Nothing for a row of the catalog file, whose rank the engine counts.
    """
    rank: Any = adapter.found.get("work_rank", adapter.found.get("rank", 0))
    return max(0, int(rank) - free) / RANK_OF_A_LAYER


def write_record(adapter: Adapter, source: str) -> dict[str, str]:
    return {
        "version": "1",  # a reader ignores fields that it does not know
        "source": source,
        **{name: getattr(adapter, name) for name in AS_THEY_ARE},
        "created": str(epoch_ms(adapter.created_at)),
        "is_folder": "1" if adapter.is_folder else "",
        "bytes": str(adapter.size_bytes),
        "trigger_words": json.dumps(adapter.trigger_words),
        "open": "1" if adapter.accounts is None else "",
        "accounts": json.dumps(sorted(adapter.accounts or ())),
        "found": json.dumps(dict(adapter.found)),
        "sampler": adapter.sampler,
        "passes": str(passes_of(adapter.sampler)) if adapter.sampler else "",  # accept counts work by these two
        "added_cost": str(added_cost(adapter, free=DEFAULT_MAX_RANK)) if "work_rank" in adapter.found else "",
        "recommended": json.dumps([adapter.steps, adapter.guidance]),
        **{name: str(value) for name in guidance.FIELDS if (value := getattr(adapter, name)) is not None},
    }


def read_record(lora_id: str, fields: Mapping[str, str]) -> Adapter:
    steps, scale = json.loads(fields.get("recommended", "[null, null]"))
    part = {name: float(fields[name]) for name in guidance.FIELDS if name in fields}
    return Adapter(
        id=lora_id,
        **{name: fields[name] for name in AS_THEY_ARE},
        created_at=from_epoch_ms(fields["created"]),
        is_folder=fields["is_folder"] == "1",
        size_bytes=int(fields["bytes"]),
        trigger_words=tuple(json.loads(fields["trigger_words"])),
        accounts=None if fields["open"] == "1" else frozenset(json.loads(fields["accounts"])),
        found=json.loads(fields["found"]),
        sampler=fields.get("sampler", ""),
        steps=steps,
        guidance=scale,
        guidance_start=part.get("guidance_start"),
        guidance_end=part.get("guidance_end"),
    )


def file_row(adapter: Adapter, place: int) -> dict[str, Any]:
    """Return a row of the catalog file as `apply_catalog.lua` takes it.

    Its digest tells whether the stored record is the same.
    """
    order, record = order_of(adapter, place), write_record(adapter, FROM_FILE)
    digest = hashlib.sha256(json.dumps([order, record], sort_keys=True).encode()).hexdigest()
    return {"id": adapter.id, "order": order, "digest": digest, "record": record}


READ_AT_ONCE = 500
"""How many records are read in one round trip."""
LOOKED_AT_MOST = 1_000
"""One page of a listing with a filter looks at this many records, which takes about 20 ms."""
MOST_LISTED = 32
"""A process keeps the lists of this many accounts; one of a thousand LoRAs takes 2 MB."""


class SharedAdapter(NamedTuple):
    """An adapter that an account owns or may use.

    `shared_with`: for its owner, the accounts that may use it too, by id, with their names.
    """

    adapter: Adapter
    shared_with: Mapping[str, str]


def position_of(adapter: Adapter) -> Position:
    return Position(epoch_ms(adapter.created_at), adapter.id)


class CatalogReader:
    """Reads LoRA adapters. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._list_loras = Script(redis, "loras/list_loras")
        self._page_loras = Script(redis, "loras/page_loras")
        self._read_lora = Script(redis, "loras/read_lora")
        self._listed: dict[str, tuple[int, list[Adapter]]] = {}
        """What each account could use, and at which revision of all LoRAs."""

    async def adapter(self, lora_id: str) -> Adapter | None:
        fields: dict[str, str] = await self._redis.hgetall(redis_key("lora", lora_id))
        return read_record(lora_id, fields) if fields else None

    async def adapters(self, account_id: str, *, limit: int | None = None) -> list[Adapter]:
        """List the adapters that the account may use, oldest first.

        Reads as many records as it lists, and next to none where nothing has changed since the last call.
        """
        known, listed = self._listed.get(account_id, (None, [])) if limit is None else (None, [])
        revision, *answer = await self._list_loras(account=account_id, most=limit, known=known)
        if not answer:
            return list(listed)
        found = [read_record(lora_id, pairs(flat)) for lora_id, flat in answer[0]]
        if limit is None:
            self._listed.pop(account_id, None)
            self._listed[account_id] = revision, list(found)
            while len(self._listed) > MOST_LISTED:
                self._listed.pop(next(iter(self._listed)))
        return found

    async def newest(self, account_id: str, *, limit: int, before: Position | None = None) -> list[Adapter]:
        """List the newest adapters that the account may use; the cost grows with `limit` alone.

        Those of one time are listed by id, the last first; with `before`, only those that come after it.
        """
        created_ms, lora_id = before or (None, None)
        answer = await self._page_loras(account=account_id, most=limit, before_ms=created_ms, before_id=lora_id)
        return [read_record(lora_id, pairs(flat)) for lora_id, flat in answer]

    async def page(
        self, account_id: str, *, limit: int, after: Position | None, takes: Callable[[Adapter], bool] | None
    ) -> tuple[list[Adapter], Position | None]:
        """Return the newest adapters after a position, of those that `takes` takes, and where to go on.

        That is None where all were seen. A page looks at `LOOKED_AT_MOST` records at most with `takes`, so that it may
        be short and yet have a next one.
        """
        at_once, found, place = READ_AT_ONCE if takes else limit + 1, list[Adapter](), after
        for _ in range(LOOKED_AT_MOST // READ_AT_ONCE):
            rows = await self.newest(account_id, limit=at_once, before=place)
            found += filter(takes, rows)
            if len(found) > limit:
                return found[:limit], position_of(found[limit - 1])
            if len(rows) < at_once:
                return found, None
            place = position_of(rows[-1])
        return found, place

    async def adapter_of(self, lora_id: str, account_id: str) -> SharedAdapter | None:
        """Return the adapter if the account owns it or may use it."""
        answer = await self._read_lora(lora=lora_id, account=account_id)
        if not answer:
            return None
        return SharedAdapter(read_record(lora_id, pairs(answer[0])), dict(answer[1]))

    async def all(self) -> list[Adapter]:
        """List every adapter, oldest first; for operators."""
        ids: list[str] = await self._redis.zrange(redis_key("loras"), 0, -1)
        found: list[Adapter] = []
        for start in range(0, len(ids), READ_AT_ONCE):
            records = await read_records(self._redis, ids[start : start + READ_AT_ONCE], "lora")
            found += [read_record(*each) for each in records.items()]
        return found

    async def open_adapter_id(self) -> str | None:
        """Return the id of the oldest adapter that everyone may use, for examples."""
        ids: list[str] = await self._redis.zrange(redis_key("loras_open"), 0, 0)
        return ids[0] if ids else None

    async def owned_ids(self, account_id: str) -> list[str]:
        return await self._redis.zrange(redis_key("loras_owned", account_id), 0, -1)


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
