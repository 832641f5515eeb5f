"""Dependencies of path operations: the parts of the service, the caller, a job, the idempotency key."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Request
from pydantic import WithJsonSchema

from serve_app.api.credentials import Credential, CredentialScheme
from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.api.request_context import RequestContext, client_address
from serve_app.domain.accounts import AuthResult, Caller, Scope
from serve_app.domain.audit import Actor, api_key
from serve_app.domain.durations import period_text
from serve_app.domain.errors import (
    Forbidden,
    InvalidParameter,
    NotFound,
    PollLimitExceeded,
    RateLimitExceeded,
    Unauthorized,
)
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.jobs.submit import Call
from serve_app.log import add_log_id
from serve_app.settings import Settings

_KEY_TEXT = re.compile(r"[\x21-\x7e]{1,255}")
_JOB_NAME = re.compile(r"[a-z2-7]{26}")
_HOST = re.compile(r"[A-Za-z0-9._\-\[\]:]{1,255}")

_OTHER_INTERFACE = {
    Variant.A: (
        "This key is for X-API-Key (interface B): send it as 'X-API-Key: <API_KEY>', or use a key made for the "
        "bearer interface."
    ),
    Variant.B: (
        "This key is for the bearer interface (A): send it as 'Authorization: Bearer <API_KEY>', or use a key made "
        "for X-API-Key."
    ),
}
"""Whoever uses a key on this interface that works on the other is told so."""


def settings_of(request: Request) -> Settings:
    """Return the settings. It is no dependency, like those below: each would cost a request 9 µs."""
    return request.app.state.settings


def accounts_of(request: Request) -> AccountParts:
    return request.app.state.accounts


def loras_of(request: Request) -> LoraParts:
    return request.app.state.loras


def jobs_of(request: Request) -> JobParts:
    return request.app.state.jobs


def operations_of(request: Request) -> OperationParts:
    return request.app.state.operations


async def authenticate(request: Request) -> Caller:
    """Return the caller, and count its request in the plan's window.

    A key that is unknown, revoked, expired or of a disabled account gets one and the same answer; the holder of a key
    that works on the other interface learns that. `ContractRoute` calls it before it reads a body; path operations get
    the same caller again. Raises `Unauthorized`, `AmbiguousCredentials`, `RateLimitExceeded`, `Forbidden`.
    """
    return await _authenticated(request, may_exceed=False)


async def authenticate_beyond_plan(request: Request) -> Caller:
    """Return the caller of what is done even where the plan is used up, since it makes less work."""
    return await _authenticated(request, may_exceed=True)


async def _authenticated(request: Request, *, may_exceed: bool) -> Caller:
    context = RequestContext.of(request)
    if context.caller is None:
        key, variant = credential_of(request)
        address = caller_address(request)
        auth = await accounts_of(request).auth.authenticate(key, variant, counted=True, address=address)
        caller = _known_caller(context, auth)
        if auth.limited and not may_exceed:
            plan = auth.window.plan
            whose = "Your plan" if plan.limit == caller.plan.limit else "This API key"
            raise RateLimitExceeded(
                f"{whose} allows {plan.limit} requests per {period_text(plan.window)}; "
                f"try again in {auth.window.seconds_left} seconds."
            )
        changing = getattr(request.app.state, "changing_scope", Scope.GENERATE)
        check_scope(caller, Scope.READ if request.method == "GET" else changing)
        context.caller = caller
        if request.scope["route"].body_field is None:  # else the body is read and checked first
            check_query(request)
    return context.caller


def check_query(request: Request) -> None:
    """Check the names of the query's parameters, where the route is closed. Raises `InvalidParameter`."""
    known: Mapping[str, bool] | None = getattr(request.scope["route"], "query", None)
    if known is None or not request.scope["query_string"]:
        return
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        shown = name if _KEY_TEXT.fullmatch(name) else "query"
        if name not in known:
            none = "there are no parameters" + (": send it in the body" if request.scope["route"].body_field else "")
            takes = f"the parameters are {', '.join(known)}" if known else none
            raise InvalidParameter(f"{shown}: unknown query parameter; {takes}")
        if not known[name] and names.count(name) > 1:
            raise InvalidParameter(f"{shown}: must be sent once")


async def load_job(request: Request, job_id: str, *prefixes: str, of: Variant | None = None) -> Job | None:
    """Return the job, if it is the caller's (and was made on `of`), without counting the request.

    Key and record are read in one round trip. Raises `Unauthorized` for every key that may not pass, whatever it asks
    for.
    """
    key, variant = credential_of(request)
    poll = await jobs_of(request).poller.poll(key, variant, valid_job_id(job_id, *prefixes), of=of)
    check_scope(_known_caller(RequestContext.of(request), poll.auth), Scope.READ)
    if poll.auth.limited:
        most = settings_of(request).polls_per_second
        raise PollLimitExceeded(f"At most {most} polls per second for each key; poll every 5 seconds.")
    check_query(request)
    return poll.job


async def still_reads(request: Request) -> bool:
    """Whether the key of a request that has long passed may still read: asked again every few seconds."""
    key, variant = credential_of(request)
    return await jobs_of(request).poller.still_reads(key, variant)


def valid_job_id(text: str, *prefixes: str) -> str:
    """Return `text` if it has the form of a job's id, else an id that no job has."""
    prefix, _, name = text.partition("_")
    return text if prefix in prefixes and _JOB_NAME.fullmatch(name) else ""


def base_url(request: Request) -> str:
    """Return scheme, host and prefix that callers use: those configured, else this request's."""
    if public_url := settings_of(request).public_url:
        return public_url.rstrip("/")
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        name, port = request.scope.get("server") or ("localhost", None)
        host = name if port is None else f"{name}:{port}"
    return f"{request.scope['scheme']}://{host}{request.scope.get('root_path', '')}"


def image_signer(request: Request) -> Callable[[str], str]:
    """Return a function that signs an image's URI as an address that a browser opens."""
    return partial(jobs_of(request).images.url, base_url=base_url(request))


async def read_idempotency_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description=(
                "Makes retries safe: for 24 hours, unless the operator has set another time, the same key with the "
                "same body returns the first request instead of creating another."
            ),
        ),
        WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"}),
    ] = None,
) -> str | None:
    is_valid = idempotency_key is None or (
        _KEY_TEXT.fullmatch(idempotency_key) and len(request.headers.getlist("idempotency-key")) == 1
    )
    if not is_valid:
        raise InvalidParameter("Idempotency-Key: must be 1 to 255 visible ASCII characters")
    return idempotency_key


IdempotencyKeyDep = Annotated[str | None, Depends(read_idempotency_key)]


async def read_call(request: Request, idempotency_key: IdempotencyKeyDep) -> Call:
    return Call(request_id=RequestContext.of(request).request_id, idempotency_key=idempotency_key)


def caller_address(request: Request) -> str:
    """Return the caller's address: the connection's, or what a trusted proxy vouches for."""
    return client_address(request.scope, settings_of(request).trusted_proxies)


def acting_key(request: Request, caller: Caller) -> Actor:
    """Return who the audit log says has acted."""
    return Actor(api_key(caller.key_id), caller_address(request))


def found(job: Job | None, name: str) -> Job:
    if job is None:
        raise NotFound(f"There is no such {name}.")
    return job


CallerDep = Annotated[Caller, Depends(authenticate)]
CallDep = Annotated[Call, Depends(read_call)]


def credential_of(request: Request) -> Credential:
    """Return the key of the request's header, or of the token that it came with. Raises `Unauthorized`."""
    scheme: CredentialScheme = request.app.state.credentials
    return RequestContext.of(request).credential or scheme.read(request.headers)


def _known_caller(context: RequestContext, auth: AuthResult) -> Caller:
    context.window = auth.window
    if auth.caller is None:
        other = _OTHER_INTERFACE.get(auth.window.plan.variant, "") if auth.is_of_other_interface else ""
        raise Unauthorized(other or "The API key is not valid.")
    add_log_id("account_id", auth.caller.account_id)
    return auth.caller


def check_scope(caller: Caller, needed: Scope) -> None:
    """Raise `Forbidden` for a key without this scope."""
    if needed not in caller.scopes:
        owned = ", ".join(sorted(caller.scopes)) or "none"
        raise Forbidden(f"This API key lacks the scope '{needed}'; it has: {owned}.")
