"""The account's owner as a caller: a request of the console counts in the plan as one with a key."""

from datetime import timedelta

from fastapi import HTTPException, Request

from serve_app.api.console.session import SignedIn
from serve_app.api.context import RequestContext
from serve_app.api.dependencies import resources_of
from serve_app.domain.accounts import Caller
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import RateLimitExceeded
from serve_app.domain.requests import Variant
from serve_app.service.submit import Call


def uncounted_owner(request: Request, session: SignedIn) -> Caller:
    """Return the owner as a caller, without counting a request."""
    account, settings = session.account, resources_of(request).settings
    plan = settings.plan_named(Variant.A, account.plan_a)
    return Caller(account_id=account.id, account_name=account.name, key_id="", variant=Variant.A, plan=plan)


async def owner_caller(request: Request, session: SignedIn) -> Caller:
    """Count one request of interface A. Raises `RateLimitExceeded`, and 403 for a disabled account."""
    counted = await resources_of(request).auth.count_owner(session.account.id, Variant.A)
    if counted.caller is None:
        raise HTTPException(403, "You have been signed out. Sign in and try again.")
    if counted.limited:
        window = counted.window
        raise RateLimitExceeded(
            f"Your plan's {window.plan.limit} requests are used; "
            f"try again in {wait_text(timedelta(seconds=window.seconds_left))}."
        )
    return counted.caller


def call_of(request: Request) -> Call:
    return Call(request_id=RequestContext.of(request).request_id)
