"""`/v1/jobs`: list, look at and cancel the jobs of an account, whichever interface they came in by."""

import re
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api import answers, credentials, door
from serve_app.api.jobs.bodies import job_record
from serve_app.domain.accounts import Caller
from serve_app.domain.errors import (
    AmbiguousCredentials,
    AtelierError,
    InvalidParameter,
    NotFound,
    RateLimitExceeded,
    Unauthorized,
)
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources

CHALLENGES = 'Bearer realm="atelier", ApiKey realm="atelier"'
DEFAULT_LIMIT, MAX_LIMIT = 50, 200
MOST_PER_MS = 32
"""An accept takes the store at least 50 µs, so an account cannot have more jobs of one millisecond than this."""

_CURSOR = re.compile(r"([0-9]{1,14})-((?:gen|up)_[a-z2-7]{26})")
_STATUS: dict[type[AtelierError], int] = {
    AmbiguousCredentials: 400,
    InvalidParameter: 400,
    Unauthorized: 401,
    NotFound: 404,
    RateLimitExceeded: 429,
}


class _Place(NamedTuple):
    """Where a job stands in the list; the newest is the greatest."""

    accepted: datetime
    job_id: str


class JobsRoom:
    """Either credential opens it; a job of another account does not exist."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def routes(self) -> list[Route]:
        return [
            Route("/v1/jobs", door.refusing(self._list, self._refuse), methods=["GET"]),
            Route("/v1/jobs/{job_id}", door.refusing(self._show, self._refuse), methods=["GET"]),
            Route("/v1/jobs/{job_id}/cancel", door.refusing(self._cancel, self._refuse), methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        caller = await self._admit(request)
        limit, after = _limit(request.query_params.get("limit")), _place(request.query_params.get("cursor"))
        jobs = await self._page(caller.account_id, limit, after)
        body: dict[str, Any] = {"jobs": [self._record(request, job) for job in jobs]}
        if len(jobs) == limit:
            body["next_cursor"] = _cursor(jobs[-1])
        return JSONResponse(body)

    async def _page(self, account_id: str, limit: int, after: _Place | None) -> list[Job]:
        """Jobs older than a place in the list; those of the same millisecond are in the order of their ids, as in the store."""
        if after is None:
            return await self._resources.jobs.list(account_id, limit=limit)
        before = after.accepted + timedelta(milliseconds=1)
        found = await self._resources.jobs.list(account_id, limit=limit + MOST_PER_MS, before=before)
        return [job for job in found if _Place(job.created_at, job.id) < after][:limit]

    async def _show(self, request: Request) -> Response:
        key, variant = _credential(request)
        job = _found(await door.look(self._resources.accounts, request, key, variant, _job_id(request)))
        return JSONResponse(self._record(request, job), headers=answers.poll_again(job))

    async def _cancel(self, request: Request) -> Response:
        """Waiting jobs end at once, running ones within a step; a job that has ended stays as it is."""
        caller, job_id = await self._admit(request), _job_id(request)
        await self._resources.jobs.cancel(job_id, account_id=caller.account_id)
        job = _found(await self._resources.jobs.get(job_id, account_id=caller.account_id))
        return JSONResponse(self._record(request, job))

    def _record(self, request: Request, job: Job) -> dict[str, Any]:
        base_url = answers.base_address(request, self._resources.settings.public_url)
        return job_record(job, partial(self._resources.images.url, base_url=base_url))

    async def _admit(self, request: Request) -> Caller:
        return await door.admit(self._resources.accounts, request, *_credential(request))

    def _refuse(self, request: Request, error: AtelierError) -> Response:
        status = _STATUS.get(type(error))
        if status is None:  # not a caller's mistake: the edge answers
            raise error
        headers = door.retry_after(request, error)
        if status == 401:
            headers["WWW-Authenticate"] = CHALLENGES
        return answers.refusal(status, error.code, error.message, headers)


def _credential(request: Request) -> tuple[str, Variant]:
    """The key, and the interface whose header carries it."""
    variant = credentials.spoken_variant(request.headers)
    read_key = credentials.bearer_key if variant is Variant.A else credentials.header_key
    return read_key(request.headers), variant


def _job_id(request: Request) -> str:
    return answers.job_id(request.path_params["job_id"], "gen", "up")


def _found(job: Job | None) -> Job:
    if job is None:
        raise NotFound("There is no such job.")
    return job


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidParameter(f"limit: must be between 1 and {MAX_LIMIT}")
    return int(text)


def _cursor(job: Job) -> str:
    return f"{round(job.created_at.timestamp() * 1000)}-{job.id}"


def _place(cursor: str | None) -> _Place | None:
    """The job that a cursor names: its time of acceptance in milliseconds, the precision the store keeps, and its id."""
    if cursor is None:
        return None
    named = _CURSOR.fullmatch(cursor)
    if named is None:
        raise InvalidParameter("cursor: must be the next_cursor of an earlier page")
    return _Place(datetime.fromtimestamp(int(named[1]) / 1000, UTC), named[2])
