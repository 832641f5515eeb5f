"""The record of a LoRA in Redis: what is written of it, and how it is read."""

import json
from collections.abc import Mapping
from typing import Any

from serve_app.domain import guidance
from serve_app.domain.catalog import Adapter
from serve_app.domain.durations import epoch_ms, from_epoch_ms
from serve_app.domain.samplers import passes_of
from serve_app.engine_options import DEFAULT_MAX_RANK

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
