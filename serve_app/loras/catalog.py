"""The LoRA adapters in Redis: their records, which of them an account may use, and changes of registered ones.

What one process changes, every other serves with its next request: lists that a process keeps are those of a revision.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from serve_app.domain.catalog import Adapter, Terms
from serve_app.domain.durations import Position, epoch_ms, milliseconds
from serve_app.domain.errors import StoreUnavailable
from serve_app.loras.open_loras import READ_AT_ONCE, OpenLoras, OwnLoras, place_of, read_loras
from serve_app.loras.record import FROM_FILE, REGISTERED, order_of, read_record, write_record
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script, pairs


def file_row(adapter: Adapter, place: int) -> dict[str, Any]:
    """Return a row of the catalog file as `apply_rows.lua` takes it.

    Its digest tells whether the stored record is the same.
    """
    order, record = order_of(adapter, place), write_record(adapter, FROM_FILE)
    digest = hashlib.sha256(json.dumps([order, record], sort_keys=True).encode()).hexdigest()
    return {"id": adapter.id, "order": order, "digest": digest, "record": record}


LOOKED_AT_MOST = 1_000
"""One page of a listing with a filter looks at this many records, which takes about 20 ms."""
MOST_LISTED = 32
"""A process keeps what this many accounts alone may use; a thousand LoRAs take 2 MB."""


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
        self._read_lora = Script(redis, "loras/read_lora")
        self._open = OpenLoras(redis)
        self._own: dict[str, OwnLoras] = {}
        """What accounts alone could use, those asked for last at the end."""

    async def adapter(self, lora_id: str) -> Adapter | None:
        fields: dict[str, str] = await self._redis.hgetall(redis_key("lora", lora_id))
        return read_record(lora_id, fields) if fields else None

    async def adapters(self, account_id: str, *, limit: int | None = None) -> list[Adapter]:
        """List the adapters that the account may use, oldest first, at most `limit` where given.

        Reads what has changed since the last call in this process, and what the account alone may use, unless nothing
        has changed at all.
        """
        own = await self._followed(account_id)
        places = self._open.places(without=own.adapters.keys() | own.denied, and_those=own.places)
        found: list[Adapter] = []
        for number, (_, lora_id) in enumerate(places[:limit], start=1):
            adapter = own.adapters.get(lora_id) or self._open.adapter(lora_id)
            if adapter is not None:  # another call may have seen its removal meanwhile
                found.append(adapter)
            if number % READ_AT_ONCE == 0:
                await asyncio.sleep(0)  # so that no other call waits for a long list
        return found

    async def read_ahead(self) -> None:
        """Read what everyone may use, so that the first list or page need not: some seconds for 100,000.

        While Redis is away, that is left to them.
        """
        with suppress(StoreUnavailable):
            await self._followed("")

    async def _followed(self, account_id: str) -> OwnLoras:
        """Bring what everyone may use up to date; return what the account alone may use."""
        while True:
            own, followed = self._own.get(account_id), self._open.revision
            known = None if own is None else own.revision
            revision, *answer = await self._list_loras(account=account_id, followed=followed, own_known=known)
            if not answer:
                await self._open.read_all(since=followed, revision=revision)
                continue
            changes, *of_account = answer
            if of_account:
                own = await self._read_own(revision, *of_account)
                self._own.pop(account_id, None)
                self._own[account_id] = own
                while len(self._own) > MOST_LISTED:
                    self._own.pop(next(iter(self._own)))
            if self._open.follow(changes, revision) and own is not None:
                return own

    async def _read_own(
        self, revision: int, owned: list[str], offered: list[str], named: list[str], grants: Sequence[str]
    ) -> OwnLoras:
        """Read what `list_loras.lua` names of an account, as it is at this revision or later."""
        decisions = pairs(grants)
        denied = frozenset(lora_id for lora_id, decision in decisions.items() if decision != "allow")
        ids = {*owned, *offered, *named, *decisions} - denied
        records = {lora_id: fields async for lora_id, fields in read_loras(self._redis, list(ids))}
        adapters = {lora_id: read_record(lora_id, fields) for lora_id, fields in records.items()}
        places = [place_of(lora_id, fields) for lora_id, fields in records.items()]
        return OwnLoras(revision, adapters, places, denied)

    async def newest(self, account_id: str, *, limit: int, before: Position | None = None) -> list[Adapter]:
        """List the newest adapters that the account may use.

        Those of one time are listed by id, the last first; with `before`, only those that come after it.
        """
        own = await self._followed(account_id)
        ids = self._open.newest(without=own.adapters.keys() | own.denied, and_those=own.places, before=before)
        rows = (own.adapters.get(lora_id) or self._open.adapter(lora_id) for lora_id in ids)
        return list(islice(filter(None, rows), limit))

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
        fields, decided = answer
        pipeline = self._redis.pipeline(transaction=False)
        for each in decided:
            pipeline.hget(redis_key("grants", each), lora_id)
            pipeline.hget(redis_key("account", each), "name")
        rows: list[str | None] = await pipeline.execute() if decided else []
        names = zip(decided, rows[::2], rows[1::2], strict=True)
        shared_with = {each: name or "" for each, decision, name in names if decision == "allow"}
        return SharedAdapter(read_record(lora_id, pairs(fields)), shared_with)

    async def all(self) -> list[Adapter]:
        """List every adapter, oldest first; for operators."""
        ids: list[str] = await self._redis.zrange(redis_key("loras"), 0, -1)
        return [read_record(*each) async for each in read_loras(self._redis, ids)]

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
        self._redis = redis
        self._settings = settings
        self._register_lora = Script(redis, "loras/register_lora")
        self._update_lora = Script(redis, "loras/update_lora")
        self._remove_lora = Script(redis, "loras/remove_lora")

    async def register(self, adapter: Adapter, terms: Terms | None = None, *, asks: bool = False) -> Registration:
        """Add an adapter if the owner's terms, where there are any, allow it; with `asks`, only say whether they do."""
        key = terms.idempotency_key if terms else None
        owned, owned_bytes, same = await self._owned(adapter) if terms else ("", 0, "")
        status, lora_id = await self._register_lora(
            lora=adapter.id,
            order=order_of(adapter),
            record=json.dumps(write_record(adapter, REGISTERED)),
            asks=asks,
            max_loras=terms.max_loras if terms else None,
            max_bytes=terms.max_bytes if terms else None,
            owned=owned,
            owned_bytes=owned_bytes,
            same=same,
            idempotency_digest="" if key is None else hashlib.sha256(key.encode()).hexdigest(),
            given_digest=terms.body.given if terms else "",
            body_digest=terms.body.before if terms else "",
            idempotency_ms=milliseconds(self._settings.idempotency_life),
        )
        if status == "changed":
            return await self.register(adapter, terms, asks=asks)
        return Registration(status, lora_id)

    async def _owned(self, adapter: Adapter) -> tuple[str, int, str]:
        """Return what `register_lora.lua` is told of the owner's LoRAs; `same` has the weights of the adapter."""
        ids: list[str] = await self._redis.zrange(redis_key("loras_owned", adapter.owner), 0, -1)
        size, same = 0, ""
        async for lora_id, fields in read_loras(self._redis, ids):
            size += int(fields["bytes"])
            if (fields["sha256"], fields["base_model"]) == (adapter.sha256, adapter.base_model):
                same = lora_id
        return hashlib.sha1(" ".join(ids).encode(), usedforsecurity=False).hexdigest(), size, same

    async def update(self, lora_id: str, account_id: str, fields: Mapping[str, str]) -> bool:
        """Change the named fields of a registered adapter's record; False when it is not the account's."""
        return await self._update_lora(lora=lora_id, owner=account_id, fields=json.dumps(dict(fields))) == 1

    async def remove(self, lora_id: str) -> Removal:
        """Remove a registered adapter and its grants."""
        return Removal(*await self._remove_lora(lora=lora_id))
