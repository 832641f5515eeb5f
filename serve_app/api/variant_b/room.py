"""Variant B's endpoints: the credential, the checks in the contract's order, one verb, one answer."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api import answers, body, credentials, door
from serve_app.api.fields import read_fields
from serve_app.api.variant_b.bodies import acknowledgement, models_list, run_record
from serve_app.api.variant_b.fields import FOREIGN, GenerationBody
from serve_app.domain.accounts import Caller
from serve_app.domain.errors import (
    AtelierError,
    Forbidden,
    IdempotencyConflict,
    InvalidJson,
    InvalidParameter,
    NotFound,
    PayloadTooLarge,
    QueueFull,
    RateLimitExceeded,
    Unauthorized,
    UnsupportedMediaType,
)
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources
from serve_app.service.submit import generate

CHALLENGE = 'ApiKey realm="atelier"'

_STATUS: dict[type[AtelierError], int] = {
    InvalidParameter: 400,
    InvalidJson: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    IdempotencyConflict: 409,
    PayloadTooLarge: 413,
    UnsupportedMediaType: 415,
    RateLimitExceeded: 429,
    QueueFull: 429,
}


class RoomB:
    """`X-API-Key`: `generate` answers `POST /v1/generate` when dispatch has seen that header."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self.generate = door.refusing(self._generate, self._refuse)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/generations/{run_id}", door.refusing(self._poll, self._refuse), methods=["GET"]),
            Route("/v1/models", door.refusing(self._models, self._refuse), methods=["GET"]),
        ]

    async def _generate(self, request: Request) -> Response:
        caller = await self._admit(request)
        document = await body.read_object(request)
        key = body.idempotency_key(request)
        wanted = read_fields(GenerationBody, document, FOREIGN).to_request()
        digest = body.digest(document)
        acceptance = await generate(self._resources, caller, wanted, idempotency_key=key, body_sha256=digest)
        location = answers.local_path(request.scope, f"/v1/generations/{acceptance.job.id}")
        headers = {"Location": location, "Retry-After": str(answers.POLL_EVERY_S)}
        if acceptance.replayed:
            headers["Idempotency-Replayed"] = "true"
        return JSONResponse(acknowledgement(acceptance.job), headers=headers)

    async def _poll(self, request: Request) -> Response:
        key, job_id = credentials.header_key(request.headers), answers.job_id(request.path_params["run_id"], "gen")
        job = await door.look(self._resources.accounts, request, key, Variant.B, job_id, of=Variant.B)
        if job is None:
            raise NotFound("There is no such run.")
        base_url = answers.base_address(request, self._resources.settings.public_url)
        record = run_record(job, partial(self._resources.images.url, base_url=base_url))
        return JSONResponse(record, headers=answers.poll_again(job))

    async def _models(self, request: Request) -> Response:
        caller = await self._admit(request)
        return JSONResponse(models_list(await self._resources.catalog.adapters(caller.account_id)))

    async def _admit(self, request: Request) -> Caller:
        return await door.admit(self._resources.accounts, request, credentials.header_key(request.headers), Variant.B)

    def _refuse(self, request: Request, error: AtelierError) -> Response:
        status = _STATUS.get(type(error))
        if status is None:  # not a caller's mistake: the edge answers
            raise error
        headers = door.retry_after(request, error)
        if status == 401:
            headers["WWW-Authenticate"] = CHALLENGE
        return answers.refusal(status, error.code, error.message, headers)
