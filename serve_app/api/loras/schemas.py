"""Request and response models of `/v1/loras`."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.schemas import CatalogId, ResponseBody, UtcTime
from serve_app.domain.catalog import Adapter

CURSOR = r"-?[0-9]{1,14}-[A-Za-z0-9_\-]{1,128}"

Cursor = Annotated[str | None, WithJsonSchema({"type": "string", "pattern": f"^{CURSOR}$"})]


class Found(ResponseBody):
    """What the check of its file saw."""

    summary: Annotated[str, Field(description="In a sentence.")]
    family: str
    rank: Annotated[int, Field(ge=1, description="The highest of its layers.")]
    layers: Annotated[int, Field(ge=1, description="How many it changes.")]
    targets: list[str]
    components: list[str]
    writer: Annotated[str, Field(description="Who wrote the file; empty where it does not say.")]


class SharedWith(ResponseBody):
    """An account that may use your LoRA."""

    account_id: str
    name: str


class Lora(ResponseBody):
    """A LoRA that your account may use."""

    id: Annotated[CatalogId, Field(description="Send it as `lora_id` (interface A) or `model_id` (interface B).")]
    name: str
    description: str
    trigger_words: list[str]
    base_model: str
    created_at: UtcTime
    is_own: Annotated[bool, Field(description="Whether your account owns it, and may change, share and delete it.")]
    sha256: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})]
    size_bytes: Annotated[
        Annotated[int, Field(ge=1)] | SkipJsonSchema[None], Field(description="Absent for the operator's.")
    ] = None
    found: Annotated[Found | SkipJsonSchema[None], Field(description="Absent for the operator's.")] = None
    shared_with: Annotated[
        list[SharedWith] | SkipJsonSchema[None], Field(description="Of a single LoRA of your own, not in lists.")
    ] = None


class Loras(ResponseBody):
    """A page of LoRAs, newest first."""

    loras: list[Lora]
    next_cursor: Annotated[Cursor, Field(description="Where the next page begins; absent on the last.")] = None


def lora_record(adapter: Adapter, account_id: str, shared_with: Mapping[str, str] | None = None) -> Lora:
    """The adapter as the account sees it."""
    is_own = adapter.owner == account_id
    found = {name: adapter.found[name] for name in Found.model_fields if name in adapter.found}
    shared = [SharedWith(account_id=each, name=name) for each, name in sorted((shared_with or {}).items())]
    return Lora(
        id=adapter.id,
        name=adapter.name,
        description=adapter.description,
        trigger_words=list(adapter.trigger_words),
        base_model=adapter.base_model,
        created_at=adapter.created_at,
        is_own=is_own,
        sha256=adapter.sha256,
        size_bytes=adapter.size_bytes or None,
        found=Found(**found) if len(found) == len(Found.model_fields) else None,
        shared_with=shared if is_own and shared_with is not None else None,
    )
