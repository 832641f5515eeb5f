"""What an assistant may read: the base models and the LoRAs that its key may use, as `/v1` shows them."""

import json

import mcp_types as types

from serve_app.api.attended import usable_loras
from serve_app.api.dependencies import authenticate, loras_of
from serve_app.api.jobs.routes import base_model_record
from serve_app.api.mcp.tools import Context, lora_row, request_of
from serve_app.domain.errors import InvalidParameter, NotFound

BASE_MODEL, LORA, JSON = "atelier://base-models/", "atelier://loras/", "application/json"
PAGE = 200
"""How many LoRAs one list names."""


async def list_resources(context: Context, params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
    """Return the base models, and a page of LoRAs. It counts against the caller's plan, as reading one does."""
    request, cursor = request_of(context), (params and params.cursor) or "0"
    caller = await authenticate(request)
    if not (cursor.isdecimal() and cursor.isascii() and len(cursor) < 10):
        raise InvalidParameter("cursor: must be the nextCursor of a previous page")
    start, loras = int(cursor), await usable_loras(request, caller)
    models = await loras_of(request).applied_catalog.applied_base_models() if start == 0 else []
    page = loras[start : start + PAGE]
    rows = [(BASE_MODEL + each.id, each.id, "A base model, and what may be asked of it.") for each in models]
    rows += [(LORA + lora.id, lora.name, lora.description) for lora in page]
    resources = [types.Resource(uri=uri, name=name, description=words, mime_type=JSON) for uri, name, words in rows]
    return types.ListResourcesResult(
        resources=resources, next_cursor=str(start + PAGE) if loras[start + PAGE :] else None
    )


async def read_resource(context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    request, uri = request_of(context), str(params.uri)
    caller = await authenticate(request)
    models = await loras_of(request).applied_catalog.applied_base_models()
    found = [base_model_record(each) for each in models if uri == BASE_MODEL + each.id]
    found += [lora_row(lora) for lora in await usable_loras(request, caller) if uri == LORA + lora.id]
    if not found:
        raise NotFound("There is no such base model, or LoRA that you may use.")
    text = json.dumps(found[0], ensure_ascii=False)
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, text=text, mime_type=JSON)])
