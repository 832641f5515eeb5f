"""Path operations on a whole account: `/v1/account` deletes it, and `/v1/usage` tells what its completed jobs used."""

from datetime import date, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.dependencies import CallerDep, accounts_of, acting_key, caller_address, operations_of
from serve_app.api.errors import BODY_ERRORS, COUNTED_ERRORS, error_responses
from serve_app.api.openapi import EXAMPLE_ADAPTER_ID, named, success
from serve_app.api.responses import json_response
from serve_app.api.routing import ClosedRoute
from serve_app.api.schemas import NO_NUL, NOT_NULL, Count, RequestBody, ResponseBody, line
from serve_app.domain.accounts import Caller, SignIn
from serve_app.domain.audit import Actor
from serve_app.domain.errors import Forbidden, InvalidParameter

router = APIRouter(route_class=ClosedRoute, strict_content_type=False)

_ERRORS = {
    403: "The password is not that of an owner of this account; or the API key lacks the scope `generate`.",
    429: "Your plan's limit is reached, or passwords were tried too fast.",
}
_ACCOUNT = "acct_c4zq2e7wvbbxm5l3r6yhtajd2i"
_REQUEST: dict[str, Any] = {"account": "acme", "password": "correct horse battery staple"}
_DELETED: dict[str, Any] = {"account_id": _ACCOUNT, "status": "deleted", "jobs": 12, "keys": 2, "verified": True}
_DELETING: dict[str, Any] = {"account_id": _ACCOUNT, "status": "deleting"}


class AccountDeletion(RequestBody):
    """The confirmation, and the proof that it is an owner's."""

    account: Annotated[
        Annotated[str, line(1, 100)], Field(description="Name of the account of this API key, as a confirmation.")
    ]
    user: Annotated[
        Annotated[str, line(1, 100)] | SkipJsonSchema[None],
        NOT_NULL,
        Field(description="Name of an invited user with the role owner; by default the account's own user."),
    ] = None
    password: Annotated[str, NO_NUL, Field(min_length=1, max_length=128, description="That user's console password.")]


class AccountDeleted(ResponseBody):
    """What became of the account. Its keys no longer work."""

    account_id: str
    status: Annotated[
        Literal["deleted", "deleting"],
        Field(description="`deleting`: there is much, or storage or Redis does not answer; the rest goes without you."),
    ]
    jobs: Annotated[Count | SkipJsonSchema[None], Field(description="Deleted jobs, with their prompts and images.")] = (
        None
    )
    keys: Annotated[Count | SkipJsonSchema[None], Field(description="Deleted API keys.")] = None
    verified: Annotated[
        bool | SkipJsonSchema[None],
        Field(
            description=(
                "Its records and images were looked for afterwards: none is left, and no LoRA is offered to its id. "
                "Answered calls, links and counts of tries go within a day by themselves."
            )
        ),
    ] = None


@router.post(
    "/v1/account/delete",
    operation_id="deleteAccount",
    tags=["Account"],
    summary="Delete your account with everything in it; takes the password of an owner",
    response_model=AccountDeleted,
    responses={
        200: success(
            "The account is closed, and deleted unless `status` says otherwise.",
            {"Deleted": _DELETED, "Deleting": _DELETING},
        ),
        **error_responses(*BODY_ERRORS, *COUNTED_ERRORS, descriptions=_ERRORS),
    },
)
async def delete_account(
    request: Request,
    caller: CallerDep,
    body: Annotated[AccountDeletion, Body(openapi_examples=named({"Delete": _REQUEST}))],
) -> Response:
    if body.account != caller.account_name:
        raise InvalidParameter("account: must be the name of the account that this API key belongs to")
    owner = await _owner(request, caller, body)
    by = Actor(owner.actor, caller_address(request))
    deleted = await operations_of(request).deletion.delete_own(owner.account, by)
    answer = AccountDeleted(account_id=caller.account_id, status="deleting")
    if deleted is not None:
        found = {"jobs": deleted.jobs, "keys": deleted.keys, "verified": not deleted.left}
        answer = answer.model_copy(update={"status": "deleted", **found})
    return json_response(answer)


async def _owner(request: Request, caller: Caller, body: AccountDeletion) -> SignIn:
    """The owner whose password was sent. Raises `Forbidden`, `TooManyTries`."""
    accounts, account_id, name = accounts_of(request), caller.account_id, body.user or caller.account_id
    check = partial(accounts.store.check_password, name, body.password, owner_of=account_id)
    by = acting_key(request, caller)
    who = await accounts.sign_ins.check(check, name, by, log=account_id, within=account_id)
    if who is None:
        raise Forbidden("The password is not that of an owner of this account.")
    return who


DEFAULT_DAYS, MOST_DAYS = 30, 366
Day = Annotated[date, WithJsonSchema({"type": "string", "format": "date"})]
Amount = Annotated[float, Field(ge=0)]

_EXAMPLE: dict[str, Any] = {
    "first_day": "2026-10-25",
    "last_day": "2026-11-23",
    "usage": [
        {
            "day": "2026-11-23",
            "key_id": "key_4lq6rwmzxvtm4hxrb3y6xpkd5e",
            "lora_id": EXAMPLE_ADAPTER_ID,
            "images": 12,
            "megapixel_steps": 94.372,
            "worker_seconds": 18.4,
        }
    ],
}


class UsageRow(ResponseBody):
    """One day's images with one key and one LoRA."""

    day: Annotated[Day, Field(description="The UTC day on which the jobs completed.")]
    key_id: Annotated[str, Field(description="Empty for jobs created in the console.")]
    lora_id: Annotated[
        str,
        Field(description="Several are joined by `+`; without one the base model's id; `upscale` for upscaled images."),
    ]
    images: Annotated[int, Field(ge=1)]
    megapixel_steps: Annotated[
        Amount, Field(description="Width × height × steps in millions, of upscales without steps.")
    ]
    worker_seconds: Annotated[Amount, Field(validation_alias="seconds", description="The jobs' share of a GPU or CPU.")]


class Usage(ResponseBody):
    """What completed jobs used. Days, keys and LoRAs without an image are left out."""

    first_day: Day
    last_day: Annotated[Day, Field(description="Today, UTC.")]
    usage: list[UsageRow]


@router.get(
    "/v1/usage",
    operation_id="getUsage",
    tags=["Usage"],
    summary="What your account used, by day, key and LoRA",
    response_model=Usage,
    responses={
        200: success("The most recent days, oldest first.", {"Usage": _EXAMPLE}),
        **error_responses(InvalidParameter, *COUNTED_ERRORS),
    },
)
async def get_usage(
    request: Request,
    caller: CallerDep,
    days: Annotated[int, Query(ge=1, le=MOST_DAYS, description="Number of days, including today.")] = DEFAULT_DAYS,
) -> Response:
    reader = accounts_of(request).usage
    last = await reader.today()
    rows = await reader.days(caller.account_id, last, days)
    shown = [UsageRow.model_validate(row) for row in rows]
    return json_response(Usage(first_day=last - timedelta(days=days - 1), last_day=last, usage=shown))
