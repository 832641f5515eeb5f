"""The steps at every room's threshold: who is calling, within which plan, and how a refusal leaves."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.exchange import exchange_of
from serve_app.domain.accounts import Caller, Gate
from serve_app.domain.errors import AtelierError, QueueFull, RateLimitExceeded, Unauthorized
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.stores.accounts import AccountStore

Endpoint = Callable[[Request], Awaitable[Response]]
Refuse = Callable[[Request, AtelierError], Response]


async def admit(accounts: AccountStore, request: Request, key: str, variant: Variant) -> Caller:
    """The caller whose key this is, counted in the plan's window. Raises `Unauthorized` and `RateLimitExceeded`.

    A key that is unknown, revoked, expired, of a disabled account or made for the other interface gets one and the same answer.
    """
    gate = await accounts.gate(key, variant, counted=True)
    caller = _recognise(request, gate)
    if gate.limited:
        plan = gate.window.plan
        raise RateLimitExceeded(
            f"Your plan allows {plan.limit} requests per {_period(plan.window.total_seconds())}; "
            f"try again in {gate.window.seconds_left} seconds."
        )
    return caller


async def look(
    accounts: AccountStore, request: Request, key: str, variant: Variant, job_id: str, *, of: Variant | None = None
) -> Job | None:
    """The job, if it is the caller's (and was made on `of`), in one round trip with the key; looking is never counted.

    Raises `Unauthorized` alike for every key that may not pass, whatever it asks for.
    """
    poll = await accounts.poll(key, variant, job_id, of=of)
    _recognise(request, poll.gate)
    return poll.job


def _recognise(request: Request, gate: Gate) -> Caller:
    exchange_of(request.scope).window = gate.window
    if gate.caller is None:
        raise Unauthorized("The API key is not valid.")
    return gate.caller


def refusing(endpoint: Endpoint, refuse: Refuse) -> Endpoint:
    """`endpoint`, with the errors a caller may see turned into answers by its room's own table."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except AtelierError as error:
            return refuse(request, error)

    return answer


def retry_after(request: Request, error: AtelierError) -> dict[str, str]:
    """The `Retry-After` header of a 429: never earlier than the moment at which trying again can succeed."""
    if isinstance(error, QueueFull):
        return {"Retry-After": str(error.retry_after_s)}
    window = exchange_of(request.scope).window
    if isinstance(error, RateLimitExceeded) and window is not None:
        return {"Retry-After": str(max(1, window.seconds_left))}
    return {}


def _period(seconds: float) -> str:
    return {3600.0: "hour", 60.0: "minute"}.get(seconds, f"{seconds:g} seconds")
