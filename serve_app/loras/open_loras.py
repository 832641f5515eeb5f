"""Keeps the LoRAs that everyone may use in one store for a process, and follows their log of changes."""

import asyncio
import zlib
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import merge
from itertools import groupby
from typing import NamedTuple

from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import Position
from serve_app.loras.record import ROWS_AT_ONE_TIME, read_record
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, in_parts, read_records

READ_AT_ONCE = 500
"""How many records are read in one round trip."""
FOLLOWED_AT_ONCE = 200
"""How many changes one answer of `list_loras.lua` has at most."""
MOST_READ = 4_000
"""So many are kept as they are listed, 2 kB each; of more the records alone, 0.5 kB each."""

LAST_MS = 10**15
"""No LoRA is made as late as this, 30,000 years from now."""

_BETWEEN = "\udcff"  # the byte FF, which no text has: a name may hold a zero
_USUAL = _BETWEEN.join(
    f"{name}{_BETWEEN}{value}"
    for name, value in {
        "bytes": 0, "trigger_words": [], "recommended": "[null, null]", "sampler": "", "passes": "", "added_cost": 0.0,
        "found": '{"format": "kohya", "rank": 16, "work_rank": 16, "layers": 722, "keys": 2166, "base": "', "owner": "",
        "accounts": [], "is_folder": "", "description": "", "base_model": "", "created": 17, "order": 17, "version": 1,
        "source": "registered", "open": 1, "sha256": "0123456789abcdef", "file": "file:///loras/.safetensors",
        "name": "", "guidance_start": "", "guidance_end": "",
    }.items()
).encode(errors="surrogateescape")  # fmt: skip
"""What records have in common, for those in this process's memory alone."""
Place = tuple[int, str]
"""A LoRA's place by creation, and its id."""
Change = tuple[str, int, Sequence[str]]
"""A LoRA's id, the revision of its change, and its record, names and values in turn; no record where it is removed."""


class OpenLoras:
    """The LoRAs that everyone may use, as they were at a revision. Not for several threads."""

    def __init__(self, redis: RedisClient) -> None:
        self.revision: int | None = None
        """The last change of LoRAs or grants that is followed; None before anything was read."""
        self._redis = redis
        self._records: dict[str, bytes] = {}
        self._places: list[Place] = []
        self._read = lru_cache(MOST_READ)(_unpacked)
        self._seen = -1
        """The revision of the newest answer."""
        self._reading = asyncio.Lock()

    def places(self, *, without: Collection[str], and_those: Iterable[Place]) -> list[Place]:
        """Return the places of all but some LoRAs, and others, oldest first."""
        return sorted([*(place for place in self._places if place[1] not in without), *and_those])

    def newest(self, *, without: Collection[str], and_those: Iterable[Place], before: Position | None) -> Iterator[str]:
        """Yield the ids of all but some LoRAs, and others, newest first; those of one time by id, the last first.

        With `before`, only those that come after it. Nothing else may happen to the store meanwhile.
        """
        end = ((before.ms + 1 if before else LAST_MS) * ROWS_AT_ONE_TIME, "")
        places = (self._places[number] for number in range(bisect_left(self._places, end) - 1, -1, -1))
        others = sorted((place for place in and_those if place < end), reverse=True)
        rows = merge((place for place in places if place[1] not in without), others, reverse=True)
        for ms, group in groupby(rows, key=lambda place: place[0] // ROWS_AT_ONE_TIME):
            for lora_id in sorted((place[1] for place in group), reverse=True):
                if before is None or (ms, lora_id) < before:
                    yield lora_id

    def adapter(self, lora_id: str) -> Adapter | None:
        record = self._records.get(lora_id)
        return None if record is None else self._read(lora_id, record)

    def follow(self, changes: Sequence[Change], revision: int) -> bool:
        """Take over what has changed, of an answer of this revision; return whether there is no more to follow.

        An answer that came later than a newer one changes nothing.
        """
        if revision >= self._seen and self.revision is not None:
            self._seen = revision
            for lora_id, _, flat in changes:
                self._put(lora_id, dict(zip(flat[::2], flat[1::2], strict=True)))
            last = changes[-1][1] if len(changes) == FOLLOWED_AT_ONCE else revision
            self.revision = max(self.revision, last)
        return self.revision is not None and self.revision >= revision

    async def read_all(self, *, since: int | None, revision: int) -> None:
        """Read every record, as they are at this revision or later, unless another call has since `since`."""
        async with self._reading:
            if self.revision != since:
                return
            ids: list[str] = await self._redis.zrange(redis_key("loras_open"), 0, -1)  # 10 ms for 100,000
            records, places = dict[str, bytes](), list[Place]()
            async for lora_id, fields in read_loras(self._redis, ids):
                records[lora_id] = _packed(fields)
                places.append(place_of(lora_id, fields))
            self._records, self._places, self.revision, self._seen = records, sorted(places), revision, revision

    def _put(self, lora_id: str, fields: Mapping[str, str]) -> None:
        before = self._records.pop(lora_id, None)
        if before is not None:
            place = place_of(lora_id, _fields(before))
            del self._places[bisect_left(self._places, place)]
        if fields.get("open") == "1":
            self._records[lora_id] = _packed(fields)
            insort(self._places, place_of(lora_id, fields))


class OwnLoras(NamedTuple):
    """What one account alone may use, and what it may not, as it was at a revision."""

    revision: int
    adapters: Mapping[str, Adapter]
    places: Sequence[Place]
    denied: frozenset[str]


async def read_loras(redis: RedisClient, ids: Sequence[str]) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """Yield the id and the record of each LoRA that is there; a round trip reads `READ_AT_ONCE`."""
    for part in in_parts(ids, READ_AT_ONCE):
        for row in (await read_records(redis, part, "lora")).items():
            yield row


def place_of(lora_id: str, fields: Mapping[str, str]) -> Place:
    return int(fields["order"]), lora_id


def _packed(fields: Mapping[str, str]) -> bytes:
    """Return a record in a tenth of the memory that it takes as texts."""
    text = _BETWEEN.join(each for pair in fields.items() for each in pair).encode(errors="surrogateescape")
    packer = zlib.compressobj(level=1, zdict=_USUAL)
    return packer.compress(text) + packer.flush()


def _fields(packed: bytes) -> Mapping[str, str]:
    flat = zlib.decompressobj(zdict=_USUAL).decompress(packed).decode(errors="surrogateescape").split(_BETWEEN)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _unpacked(lora_id: str, packed: bytes) -> Adapter:
    return read_record(lora_id, _fields(packed))
