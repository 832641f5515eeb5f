"""Writes and reads the records of LoRAs in Redis."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import epoch_ms, from_epoch_ms

VERSION = 1
"""Of the records written. A reader ignores fields that it does not know."""
FROM_FILE, REGISTERED = "file", "registered"
ROWS_AT_ONE_TIME = 1_000


def order_of(adapter: Adapter, place: int = 0) -> str:
    """Where it is listed: by creation, rows of one millisecond by their `place` in the catalog file."""
    return str(epoch_ms(adapter.created_at) * ROWS_AT_ONE_TIME + min(place, ROWS_AT_ONE_TIME - 1))


def write_record(adapter: Adapter, source: str) -> dict[str, str]:
    return {
        "version": str(VERSION),
        "source": source,
        "name": adapter.name,
        "description": adapter.description,
        "created": str(epoch_ms(adapter.created_at)),
        "file": adapter.file,
        "is_folder": "1" if adapter.is_folder else "",
        "sha256": adapter.sha256,
        "base_model": adapter.base_model,
        "owner": adapter.owner,
        "bytes": str(adapter.size_bytes),
        "trigger_words": json.dumps(adapter.trigger_words),
        "open": "1" if adapter.accounts is None else "",
        "accounts": json.dumps(sorted(adapter.accounts or ())),
        "found": json.dumps(dict(adapter.found)),
    }


def read_record(lora_id: str, fields: Mapping[str, str]) -> Adapter:
    return Adapter(
        id=lora_id,
        name=fields["name"],
        description=fields["description"],
        created_at=from_epoch_ms(fields["created"]),
        file=fields["file"],
        is_folder=fields["is_folder"] == "1",
        sha256=fields["sha256"],
        base_model=fields["base_model"],
        owner=fields["owner"],
        size_bytes=int(fields.get("bytes", "0")),
        trigger_words=tuple(json.loads(fields.get("trigger_words", "[]"))),
        accounts=None if fields["open"] == "1" else frozenset(json.loads(fields["accounts"])),
        found=json.loads(fields["found"]),
    )


def file_row(adapter: Adapter, place: int) -> dict[str, Any]:
    """Return a row of the catalog file as `apply_catalog.lua` takes it.

    Its digest tells whether the stored record is the same.
    """
    order, record = order_of(adapter, place), write_record(adapter, FROM_FILE)
    digest = hashlib.sha256(json.dumps([order, record], sort_keys=True).encode()).hexdigest()
    return {"id": adapter.id, "order": order, "digest": digest, "record": record}
