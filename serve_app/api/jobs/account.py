"""Path operation of `/v1/account`: its owner deletes an account with everything in it."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from serve_app.api.dependencies import CallerDep, caller_address, resources_of
from serve_app.api.errors import BODY_ERRORS, COUNTED_ERRORS, error_responses
from serve_app.api.jobs.schemas import Count
from serve_app.api.openapi import named, success
from serve_app.api.responses import json_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import NO_NUL, NOT_NULL, RequestBody, ResponseBody, line
from serve_app.domain.accounts import Caller, SignIn
from serve_app.domain.audit import OWNER, api_key, user
from serve_app.domain.errors import Forbidden, InvalidParameter
from serve_app.service.delete_account import DeletedAccount, delete_own_account
from serve_app.service.operate import Actor
from serve_app.service.password_check import check_password

router = APIRouter(route_class=ContractRoute, tags=["Account"], strict_content_type=False)

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
        Field(description="`deleting`: storage or Redis does not answer; the rest is removed as soon as it does."),
    ]
    jobs: Annotated[Count | SkipJsonSchema[None], Field(description="Deleted jobs, with their prompts and images.")] = (
        None
    )
    keys: Annotated[Count | SkipJsonSchema[None], Field(description="Deleted API keys.")] = None
    verified: Annotated[
        bool | SkipJsonSchema[None],
        Field(
            description="Redis and the storage were searched afterwards and hold nothing of the account; false where the operator's own configuration names it."
        ),
    ] = None


@router.post(
    "/v1/account/delete",
    operation_id="deleteAccount",
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
    by = Actor(user(owner.user.id) if owner.user.id else OWNER, caller_address(request))
    deleted = await delete_own_account(resources_of(request), owner.account, by)
    return json_response(_answer(caller, deleted))


async def _owner(request: Request, caller: Caller, body: AccountDeletion) -> SignIn:
    """The owner whose password was sent. Raises `Forbidden`, `TooManyTries`."""
    who = await check_password(
        resources_of(request),
        body.user or caller.account_id,
        body.password,
        actor=api_key(caller.key_id),
        address=caller_address(request),
        owner_of=caller.account_id,
    )
    if who is None:
        raise Forbidden("The password is not that of an owner of this account.")
    return who


def _answer(caller: Caller, deleted: DeletedAccount | None) -> AccountDeleted:
    if deleted is None:
        return AccountDeleted(account_id=caller.account_id, status="deleting")
    return AccountDeleted(
        account_id=caller.account_id,
        status="deleted",
        jobs=deleted.jobs,
        keys=deleted.keys,
        verified=not deleted.left,
    )
