"""Path operations of `/v1/webhooks`: where an account is told of the ends of its jobs, and what was delivered."""

import re
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Path, Request, Response
from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.dependencies import CallerDep, IdempotencyKeyDep, accounts_of, acting_key, base_url, jobs_of
from serve_app.api.errors import BODY_ERRORS, COUNTED_ERRORS, error_responses
from serve_app.api.openapi import ACCEPTED_HEADERS, deletion, named, success
from serve_app.api.responses import json_response
from serve_app.api.routing import ClosedRoute
from serve_app.api.schemas import NOT_NULL, RequestBody, ResponseBody, UtcTime, line
from serve_app.domain.accounts import Caller, Scope
from serve_app.domain.audit import Act
from serve_app.domain.errors import Forbidden, IdempotencyConflict, InvalidParameter, NotFound
from serve_app.webhooks.endpoints import EVENTS, OF_JOBS, TEST, Event
from serve_app.webhooks.targets import LONGEST_URL

router = APIRouter(route_class=ClosedRoute, tags=["Webhooks"], strict_content_type=False)

ENDPOINT_PATTERN = f"^(?:{OF_JOBS}|wh_[0-9a-f]{{26}})$"
DELIVERY_PATTERN = "^msg_(?:(?:gen|up|job)_[a-z2-7]{26}_[0-9]+|test_[0-9a-f]{26})$"
_ERRORS = {403: "The API key lacks the scopes `read` and `generate`, or is kept to some LoRAs."}
_URL, _SECRET = "https://example.com/atelier", "whsec_tKQvSpbPW8rwsrZqlMQkwGnDf2sAPbhN1vbnZDYHzwU="
_WEBHOOK: dict[str, Any] = {
    "id": "wh_9f3a1c5e7b2d4f6a8c0e1b3d5f",
    "url": _URL,
    "events": ["job.completed", "job.failed"],
    "status": "active",
    "created_at": "2026-11-26T12:00:00Z",
}
_DELIVERY: dict[str, Any] = {
    "id": "msg_gen_c4zq2e7wvbbxm5l3r6yhtajd2i_1",
    "type": "job.completed",
    "job_id": "gen_c4zq2e7wvbbxm5l3r6yhtajd2i",
    "status": "waiting",
    "attempts": 2,
    "ended_at": "2026-11-26T12:00:08Z",
    "next_attempt_at": "2026-11-26T12:00:33Z",
    "response_status": 503,
    "error": "answered 503",
}
_TEST = {"id": "msg_test_…", "type": TEST, "status": "waiting", "attempts": 0, "ended_at": "2026-11-26T12:00:08Z"}
_REPLAYED = {"Idempotency-Replayed": ACCEPTED_HEADERS["Idempotency-Replayed"]}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["type", "timestamp", "data"],
    "additionalProperties": False,
    "properties": {
        "type": {"type": "string", "enum": list(EVENTS)},
        "timestamp": {"type": "string", "format": "date-time", "description": "When the job ended."},
        "data": {"$ref": "#/components/schemas/Job", "description": "As `getJob` shows it when the message is sent."},
    },
}
MESSAGES: dict[str, Any] = {
    "jobEnded": {
        "post": {
            "operationId": "jobEnded",
            "summary": "What a webhook is told: a job has ended",
            "description": "Verify it by Standard Webhooks, and answer with any 2xx status within 15 seconds.",
            "parameters": [
                {"name": name, "in": "header", "required": True, "schema": {"type": "string"}, "description": said}
                for name, said in (
                    ("webhook-id", "The same in every attempt at this end of the job, at every address."),
                    ("webhook-timestamp", "When this attempt was made, in Unix seconds."),
                    (
                        "webhook-signature",
                        "Signatures of id, timestamp and body: `v1,` and base64, with spaces between.",
                    ),
                )
            ],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _MESSAGE}}},
            "responses": {"2XX": {"description": "It has arrived. Any other answer is tried again for a day."}},
        }
    }
}
"""What this service sends to webhooks, as OpenAPI describes it."""


WebhookUrl = Annotated[str, line(1, LONGEST_URL)]
Events = Annotated[list[Event], Field(min_length=1, max_length=len(EVENTS))]
_OF_URL = Field(
    description="An HTTPS address at port 443 of the public internet, whose name is looked up when a message is sent; "
    "redirects are not followed."
)
_OF_EVENTS = Field(description="What it is told of; by default, of every end of a job.")


class NewWebhook(RequestBody):
    """Where to tell the ends of all jobs of the account."""

    url: Annotated[WebhookUrl, _OF_URL]
    events: Annotated[Events | SkipJsonSchema[None], NOT_NULL, _OF_EVENTS] = None


class WebhookChange(RequestBody):
    """What to change of a webhook. What is left out stays."""

    url: Annotated[WebhookUrl | SkipJsonSchema[None], NOT_NULL, _OF_URL] = None
    events: Annotated[Events | SkipJsonSchema[None], NOT_NULL, _OF_EVENTS] = None
    enabled: Annotated[
        bool | SkipJsonSchema[None], NOT_NULL, Field(description="Whether it is told of jobs that end from now on.")
    ] = None


class Webhook(ResponseBody):
    """An endpoint of the account. It is told of every job that ends, from its creation on."""

    id: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^wh_[0-9a-f]{26}$"})]
    url: str
    events: Annotated[list[Event], Field(description="What it is told of.")]
    status: Annotated[
        Literal["active", "disabled"],
        Field(description="`disabled`: it answered 410, or was disabled, and is told nothing until it is enabled."),
    ]
    created_at: UtcTime


class CreatedWebhook(Webhook):
    """A new endpoint, with the secret that its receiver verifies signatures by."""

    secret: Annotated[str, Field(description="Shown only here: keep it. It begins with `whsec_`.")]


class Webhooks(ResponseBody):
    """All endpoints of the account, oldest first."""

    webhooks: list[Webhook]


class Secret(ResponseBody):
    """A new secret. The one before signs too for 24 hours."""

    secret: Annotated[str, Field(description="Shown only here: keep it. It begins with `whsec_`.")]


class Delivery(ResponseBody):
    """A message about the end of a job, or a test, and what became of it."""

    id: Annotated[str, Field(description="The header `webhook-id` of every attempt.")]
    type: Annotated[str, Field(description=f"`job.` and how the job ended; `{TEST}` of a test.")]
    job_id: Annotated[str | SkipJsonSchema[None], Field(description="Absent for a test.")] = None
    status: Literal["waiting", "delivered", "failed"]
    attempts: Annotated[int, Field(ge=0)]
    ended_at: Annotated[UtcTime, Field(description="When the job ended, or the test was asked for.")]
    next_attempt_at: Annotated[UtcTime | SkipJsonSchema[None], Field(description="Of one that waits.")] = None
    response_status: Annotated[int | SkipJsonSchema[None], Field(description="The last answer's HTTP status.")] = None
    error: Annotated[str | SkipJsonSchema[None], Field(description="Why the last attempt failed.")] = None


class Deliveries(ResponseBody):
    """The deliveries that wait, by their next attempt, then the newest 100 that have ended."""

    deliveries: list[Delivery]


async def read_endpoint_id(
    webhook_id: Annotated[
        str,
        Path(
            description="Its id; `jobs` stands for the addresses that jobs name themselves.",
            json_schema_extra={"type": "string", "pattern": ENDPOINT_PATTERN},
        ),
    ],
) -> str:
    if not re.fullmatch(ENDPOINT_PATTERN, webhook_id):
        raise NotFound("There is no such webhook.")
    return webhook_id


EndpointId = Annotated[str, Depends(read_endpoint_id)]


async def changing(caller: CallerDep) -> Caller:
    """Return a caller who may read every job, as receivers of webhooks do. Raises `Forbidden`."""
    if Scope.READ not in caller.scopes or caller.adapters is not None:
        raise Forbidden("Webhooks tell of all jobs: this API key lacks the scope 'read', or is kept to some LoRAs.")
    return caller


ChangingCaller = Annotated[Caller, Depends(changing)]


@router.post(
    "/v1/webhooks",
    operation_id="createWebhook",
    summary="Be told by POST when jobs end, by Standard Webhooks",
    status_code=201,
    response_model=CreatedWebhook,
    responses={
        201: success("The webhook, with its secret.", {"Created": {**_WEBHOOK, "secret": _SECRET}}, headers=_REPLAYED),
        **error_responses(*BODY_ERRORS, *COUNTED_ERRORS, IdempotencyConflict, descriptions=_ERRORS),
    },
)
async def create_webhook(
    request: Request,
    caller: ChangingCaller,
    body: Annotated[NewWebhook, Body(openapi_examples=named({"Create": {"url": _URL}}))],
    key: IdempotencyKeyDep,
) -> Response:
    created = await jobs_of(request).webhooks.create(
        caller.account_id, body.url, events=body.events or (), base_url=base_url(request), idempotency_key=key
    )
    if not created.replayed:
        await _record(request, caller, Act.WEBHOOK_ADDED, created.endpoint.id)
    shown = CreatedWebhook(**asdict(created.endpoint), secret=created.secret)
    return json_response(shown, status=201, headers={"Idempotency-Replayed": "true"} if created.replayed else None)


@router.get(
    "/v1/webhooks",
    operation_id="listWebhooks",
    summary="List your webhooks",
    response_model=Webhooks,
    responses={
        200: success("The webhooks.", {"Webhooks": {"webhooks": [_WEBHOOK]}}),
        **error_responses(*COUNTED_ERRORS),
    },
)
async def list_webhooks(request: Request, caller: CallerDep) -> Response:
    found = await jobs_of(request).webhooks.list(caller.account_id)
    return json_response(Webhooks.model_validate({"webhooks": found}))


@router.patch(
    "/v1/webhooks/{webhook_id}",
    operation_id="changeWebhook",
    summary="Change a webhook, disable it or enable it again",
    response_model=Webhook,
    responses={
        200: success("The changed webhook.", {"Webhook": _WEBHOOK}),
        **error_responses(*BODY_ERRORS, *COUNTED_ERRORS, NotFound, descriptions=_ERRORS),
    },
)
async def change_webhook(
    request: Request,
    caller: ChangingCaller,
    webhook_id: EndpointId,
    body: Annotated[WebhookChange, Body(openapi_examples=named({"Enable again": {"enabled": True}}))],
) -> Response:
    changed = await jobs_of(request).webhooks.change(caller.account_id, webhook_id, **body.model_dump())
    await _record(request, caller, Act.WEBHOOK_CHANGED, webhook_id)
    return json_response(Webhook.model_validate(changed))


@router.post(
    "/v1/webhooks/{webhook_id}/test",
    operation_id="testWebhook",
    summary="Send a webhook a test message, once, even if it is disabled",
    description=f'A message like any other: `{{"type": "{TEST}", "timestamp": "…", "data": {{"id": "wh_…"}}}}`.',
    response_model=Delivery,
    responses={
        200: success("The delivery, which waits.", {"Waiting": _TEST}),
        **error_responses(InvalidParameter, *COUNTED_ERRORS, NotFound, descriptions=_ERRORS),
    },
)
async def send_test(
    request: Request, caller: ChangingCaller, webhook_id: EndpointId, key: IdempotencyKeyDep
) -> Response:
    delivery = await jobs_of(request).webhooks.test(caller.account_id, webhook_id, key)
    return json_response(Delivery.model_validate(delivery))


@router.delete(
    "/v1/webhooks/{webhook_id}",
    operation_id="deleteWebhook",
    summary="Delete a webhook; what waits for it is not delivered any more",
    **deletion("Deleted.", descriptions=_ERRORS),
)
async def delete_webhook(request: Request, caller: ChangingCaller, webhook_id: EndpointId) -> Response:
    await jobs_of(request).webhooks.delete(caller.account_id, webhook_id)
    await _record(request, caller, Act.WEBHOOK_REMOVED, webhook_id)
    return Response(status_code=204)


@router.post(
    "/v1/webhooks/{webhook_id}/secret",
    operation_id="rollWebhookSecret",
    summary="Make a new secret; the one before signs too for 24 hours",
    response_model=Secret,
    responses={
        200: success("The new secret.", {"Rolled": {"secret": _SECRET}}),
        **error_responses(*COUNTED_ERRORS, NotFound, descriptions=_ERRORS),
    },
)
async def roll_secret(request: Request, caller: ChangingCaller, webhook_id: EndpointId) -> Response:
    secret = await jobs_of(request).webhooks.roll(caller.account_id, webhook_id, base_url=base_url(request))
    await _record(request, caller, Act.WEBHOOK_ROLLED, webhook_id)
    return json_response(Secret(secret=secret))


@router.get(
    "/v1/webhooks/{webhook_id}/deliveries",
    operation_id="listDeliveries",
    summary="List what was delivered to a webhook, and what waits",
    response_model=Deliveries,
    responses={
        200: success("The deliveries; each can be read for 7 days.", {"Deliveries": {"deliveries": [_DELIVERY]}}),
        **error_responses(*COUNTED_ERRORS, NotFound),
    },
)
async def list_deliveries(request: Request, caller: CallerDep, webhook_id: EndpointId) -> Response:
    found = await jobs_of(request).webhooks.deliveries(caller.account_id, webhook_id)
    return json_response(Deliveries.model_validate({"deliveries": found}))


@router.post(
    "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver",
    operation_id="redeliver",
    summary="Deliver a message again, with the same `webhook-id`",
    response_model=Delivery,
    responses={
        200: success("The delivery, which waits again.", {"Waiting": {**_DELIVERY, "attempts": 0}}),
        **error_responses(*COUNTED_ERRORS, NotFound, descriptions=_ERRORS),
    },
)
async def redeliver(
    request: Request,
    caller: ChangingCaller,
    webhook_id: EndpointId,
    delivery_id: Annotated[
        str, Path(description="Its id.", json_schema_extra={"type": "string", "pattern": DELIVERY_PATTERN})
    ],
) -> Response:
    if not re.fullmatch(DELIVERY_PATTERN, delivery_id):
        raise NotFound("There is no such delivery.")
    delivery = await jobs_of(request).webhooks.redeliver(caller.account_id, webhook_id, delivery_id)
    return json_response(Delivery.model_validate(delivery))


async def _record(request: Request, caller: Caller, act: Act, webhook_id: str) -> None:
    await accounts_of(request).audit.record(caller.account_id, act, acting_key(request, caller), webhook_id)
