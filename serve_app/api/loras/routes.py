"""Path operations of `/v1/loras`: what an account may use, and its own LoRAs."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response

from serve_app.api.body import media_type
from serve_app.api.dependencies import (
    CallerDep,
    IdempotencyKeyDep,
    caller_address,
    image_signer,
    jobs_of,
    loras_of,
    operations_of,
)
from serve_app.api.errors import BODY_ERRORS, COUNTED_ERRORS, error_responses
from serve_app.api.loras.schemas import (
    CURSOR,
    GrantRequest,
    Lora,
    LoraChange,
    LoraReference,
    Loras,
    lora_record,
)
from serve_app.api.loras.upload import add_reference, form_schema, read_upload
from serve_app.api.openapi import CREATED_HEADERS, deletion, named, success
from serve_app.api.responses import created_headers, json_response
from serve_app.api.routing import ClosedRoute
from serve_app.api.schemas import DEFAULT_PAGE_SIZE, PageSize, page_after
from serve_app.domain.catalog import Adapter, bases_of_loras
from serve_app.domain.durations import Position
from serve_app.domain.errors import IdempotencyConflict, InvalidParameter, LoraQuotaExceeded, NotFound
from serve_app.jobs.samples import find_pictures
from serve_app.loras.account_loras import AccountActor, require_all_loras
from serve_app.loras.catalog import SharedAdapter, position_of
from serve_app.loras.registration import Registered

_LORA: dict[str, Any] = {
    "id": "model_nq6w3s5kfrzp2xvd7bmtch4ylu",
    "name": "Ink",
    "description": "Thin black lines on paper.",
    "trigger_words": ["ink drawing"],
    "base_model": "pocket",
    "base_models": ["pocket"],
    "created_at": "2026-11-21T12:00:00Z",
    "is_own": True,
    "sha256": "9f" * 32,
    "size_bytes": 401221,
    "found": {
        "summary": "SDXL, rank 16, attention and convolution, from sd-scripts",
        "family": "SDXL",
        "rank": 16,
        "layers": 722,
        "targets": ["attention", "convolution"],
        "components": ["unet"],
        "writer": "sd-scripts",
        "algorithm": "LoRA",
        "suggested_trigger_words": ["ink drawing", "paper"],
    },
    "sample_url": "https://api.example.com/files/images/…/0.png?exp=…&kid=…&sig=…",
}
_METADATA = {"ss_base_model_version": "sdxl_base_v1-0", "ss_num_train_images": "40", "ss_learning_rate": "0.0001"}
_WHOLE: dict[str, Any] = {**_LORA, "found": {**_LORA["found"], "metadata": _METADATA}}
LORA = {"LoRA": {**_WHOLE, "shared_with": []}}
SHARED = {"Shared": {**_WHOLE, "shared_with": [{"account_id": "acct_c4zq2e7wvbbxm5l3r6yhtajd2i", "name": "zeta"}]}}
LORAS = {"LoRAs": {"loras": [_LORA]}}
FORM = {"File": {"name": "Ink", "base_model": "pocket", "trigger_words": "ink drawing", "file": "@ink.safetensors"}}
REFERENCES = {
    "Known weights": {"name": "Ink", "base_model": "pocket", "sha256": "9f" * 32},
    "Fetched": {"name": "Ink", "base_model": "pocket", "source": "s3://acme-loras/ink.safetensors"},
}
CHANGE = {"Rename": {"name": "Ink on paper"}, "Words": {"trigger_words": ["ink drawing", "paper"]}}
GRANT = {"By name": {"account": "zeta"}}


router = APIRouter(route_class=ClosedRoute, tags=["LoRAs"], strict_content_type=False)

LoraId = Annotated[str, Path(description="Its id.", json_schema_extra={"minLength": 1, "maxLength": 128})]
AccountName = Annotated[str, Path(description="The other account's id or name.", json_schema_extra={"minLength": 1})]
_OF_ANOTHER = {404: "Your account has no such LoRA, or there is no such account."}
_OF_UPLOADS = {
    404: "No LoRA of your account has the weights of this `sha256`.",
    409: "The `Idempotency-Key` was used before with another body, or your plan allows no further LoRA.",
    413: "The file is larger than this service accepts.",
    415: "The body is neither a multipart form nor JSON.",
}
_FORM = {"schema": form_schema(), "examples": named(FORM)}
_REFERENCE = {"schema": LoraReference.model_json_schema(), "examples": named(REFERENCES)}


async def acting(request: Request, caller: CallerDep) -> AccountActor:
    return AccountActor(caller=caller, address=caller_address(request))


ActorDep = Annotated[AccountActor, Depends(acting)]


@router.get(
    "/v1/loras",
    operation_id="listLoras",
    summary="List the LoRAs that you may use, newest first",
    response_model=Loras,
    responses={
        200: success("A page of LoRAs.", LORAS),
        **error_responses(InvalidParameter, *COUNTED_ERRORS),
    },
)
async def list_loras(
    request: Request,
    caller: CallerDep,
    after: Annotated[Position | None, page_after(CURSOR)],
    limit: PageSize = DEFAULT_PAGE_SIZE,
    base_model: Annotated[str | None, Query(max_length=128, description="Only LoRAs that it draws with.")] = None,
    name: Annotated[str | None, Query(max_length=100, description="Only LoRAs of this name, in any case.")] = None,
    q: Annotated[
        str | None, Query(max_length=100, description="Words of name, description, trigger words or id.")
    ] = None,
) -> Response:
    catalog, base_models = loras_of(request).catalog, await loras_of(request).applied_catalog.applied_base_models()
    drawn_on = bases_of_loras(base_models)
    bases = None if base_model is None else {base for base, on in drawn_on.items() if base_model in on} | {base_model}
    takes = partial(_matches, bases=bases, name=name, q=q)
    if caller.adapters is None:
        wanted = None if (base_model, name, q) == (None, None, None) else takes
        page, following = await catalog.page(caller.account_id, limit=limit, after=after, takes=wanted)
    else:
        found = [await catalog.adapter_of(each, caller.account_id) for each in caller.adapters]
        chosen = sorted((each.adapter for each in found if each and takes(each.adapter)), key=position_of, reverse=True)
        rest = [each for each in chosen if after is None or position_of(each) < after]
        page, following = rest[:limit], position_of(rest[limit - 1]) if len(rest) > limit else None
    samples = await _sample_urls(request, page)
    listed = [
        lora_record(
            each,
            caller.account_id,
            recommended=each.recommended(base_models),
            drawn_on=drawn_on.get(each.base_model, ()),
            sample_url=samples.get(each.id),
        )
        for each in page
    ]
    return json_response(Loras(loras=listed, next_cursor=following and following.cursor))


@router.get(
    "/v1/loras/{lora_id}",
    operation_id="getLora",
    summary="Read a LoRA",
    response_model=Lora,
    responses={200: success("The LoRA.", LORA), **error_responses(*COUNTED_ERRORS, NotFound)},
)
async def get_lora(request: Request, caller: CallerDep, lora_id: LoraId) -> Response:
    found = await loras_of(request).owned.find(caller, lora_id)
    return json_response(await _record(request, caller.account_id, found))


@router.post(
    "/v1/loras",
    operation_id="addLora",
    summary="Add a LoRA: it is checked while you wait and available immediately",
    status_code=201,
    response_model=Lora,
    responses={
        200: success("Your account already has these weights for this base model.", LORA, model=Lora),
        201: success("Added.", LORA, headers=CREATED_HEADERS),
        **error_responses(
            *BODY_ERRORS,
            *COUNTED_ERRORS,
            NotFound,
            IdempotencyConflict,
            LoraQuotaExceeded,
            descriptions=_OF_UPLOADS,
        ),
    },
    openapi_extra={
        "requestBody": {"required": True, "content": {"multipart/form-data": _FORM, "application/json": _REFERENCE}}
    },
)
async def add_lora(request: Request, by: ActorDep, idempotency_key: IdempotencyKeyDep) -> Response:
    require_all_loras(by.caller)
    async with loras_of(request).uploads.hold(by.caller.account_id) as place:
        registered = await _add(request, by, place, idempotency_key)
    warning = await operations_of(request).state.base_warning(registered.adapter.base_model)
    body = await _record(request, by.caller.account_id, SharedAdapter(registered.adapter, {}), warning=warning)
    if registered.status == "same":
        return json_response(body)
    is_replayed = registered.status == "replayed"
    headers = created_headers(request, f"/v1/loras/{registered.adapter.id}", replayed=is_replayed)
    return json_response(body, status=201, headers=headers)


async def _add(request: Request, by: AccountActor, place: AsyncExitStack, idempotency_key: str | None) -> Registered:
    if not media_type(request).startswith("multipart/"):
        return await add_reference(request, by, place=place, idempotency_key=idempotency_key)
    upload = await read_upload(request, place)
    owned, offer = loras_of(request).owned, upload.form.to_offer()
    return await owned.add(by, upload.path, offer, place=place, idempotency_key=idempotency_key)


@router.patch(
    "/v1/loras/{lora_id}",
    operation_id="changeLora",
    summary="Update a LoRA of your own",
    response_model=Lora,
    responses={
        200: success("The updated LoRA.", LORA),
        **error_responses(*BODY_ERRORS, *COUNTED_ERRORS, NotFound),
    },
)
async def change_lora(
    request: Request,
    by: ActorDep,
    lora_id: LoraId,
    body: Annotated[LoraChange, Body(openapi_examples=named(CHANGE))],
) -> Response:
    changed = await loras_of(request).owned.change(by, lora_id, **body.model_dump())
    return json_response(await _record(request, by.caller.account_id, changed))


@router.delete(
    "/v1/loras/{lora_id}",
    operation_id="deleteLora",
    summary="Delete a LoRA of your own, with its weights",
    **deletion("Deleted: jobs that wait for it or run with it end as `lora_unavailable`."),
)
async def delete_lora(request: Request, by: ActorDep, lora_id: LoraId) -> Response:
    await loras_of(request).owned.remove(by, lora_id)
    return Response(status_code=204)


@router.post(
    "/v1/loras/{lora_id}/grants",
    operation_id="shareLora",
    summary="Share a LoRA of your own with another account",
    response_model=Lora,
    responses={
        200: success("The LoRA and the accounts it is shared with.", SHARED),
        **error_responses(*BODY_ERRORS, *COUNTED_ERRORS, NotFound, descriptions=_OF_ANOTHER),
    },
)
async def share_lora(
    request: Request,
    by: ActorDep,
    lora_id: LoraId,
    body: Annotated[GrantRequest, Body(openapi_examples=named(GRANT))],
) -> Response:
    shared = await loras_of(request).owned.share(by, lora_id, body.account)
    return json_response(await _record(request, by.caller.account_id, shared))


@router.delete(
    "/v1/loras/{lora_id}/grants/{account:path}",
    operation_id="unshareLora",
    summary="Stop sharing a LoRA of your own with another account",
    **deletion(
        "Its jobs with the LoRA that wait or run end as `lora_unavailable`.", InvalidParameter, descriptions=_OF_ANOTHER
    ),
)
async def unshare_lora(request: Request, by: ActorDep, lora_id: LoraId, account: AccountName) -> Response:
    await loras_of(request).owned.unshare(by, lora_id, account)
    return Response(status_code=204)


async def _record(request: Request, account_id: str, found: SharedAdapter, *, warning: str = "") -> Lora:
    adapter, shared_with = found
    base_models = await loras_of(request).applied_catalog.applied_base_models()
    sample_url = (await _sample_urls(request, [adapter])).get(adapter.id)
    return lora_record(
        adapter,
        account_id,
        shared_with,
        recommended=adapter.recommended(base_models),
        drawn_on=bases_of_loras(base_models).get(adapter.base_model, ()),
        sample_url=sample_url,
        warning=warning,
    )


async def _sample_urls(request: Request, adapters: Sequence[Adapter]) -> Mapping[str, str]:
    """Return signed addresses of the sample pictures, by LoRA."""
    pictures = await find_pictures(loras_of(request).samples, jobs_of(request).reader, adapters)
    url_of = image_signer(request)
    return {lora_id: url_of(picture.image_uri) for lora_id, picture in pictures.items()}


def _matches(adapter: Adapter, bases: Collection[str] | None, name: str | None, q: str | None) -> bool:
    if bases is not None and adapter.base_model not in bases:
        return False
    if name is not None and adapter.name.casefold() != name.strip().casefold():
        return False
    return q is None or adapter.holds(q)
