"""Variant A's endpoints: the credential, the checks in the contract's order, one verb, one answer."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api import answers, body, credentials, door
from serve_app.api.fields import read_fields
from serve_app.api.variant_a.bodies import acknowledgement, status_record
from serve_app.api.variant_a.fields import FOREIGN, GenerationBody, UpscaleBody
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
from serve_app.service.submit import generate, upscale
from serve_app.stores.jobs import Acceptance

CHALLENGE = 'Bearer realm="atelier"'

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


class RoomA:
    """`Authorization: Bearer`: `generate` answers `POST /v1/generate` when dispatch has seen a bearer key."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self.generate = door.refusing(self._generate, self._refuse)

    def routes(self) -> list[Route]:
        poll = door.refusing(self._poll, self._refuse)
        return [
            Route("/v1/generate/{request_id}", poll, methods=["GET"]),
            Route("/v1/upscale", door.refusing(self._upscale, self._refuse), methods=["POST"]),
            Route("/v1/upscale/{request_id}", poll, methods=["GET"]),
        ]

    async def _generate(self, request: Request) -> Response:
        caller = await self._admit(request)
        document = await body.read_object(request)
        key = body.idempotency_key(request)
        wanted = read_fields(GenerationBody, document, FOREIGN).to_request()
        digest = body.digest(document)
        acceptance = await generate(self._resources, caller, wanted, idempotency_key=key, body_sha256=digest)
        return _acknowledge(request, acceptance)

    async def _upscale(self, request: Request) -> Response:
        caller = await self._admit(request)
        document = await body.read_object(request)
        key = body.idempotency_key(request)
        wanted = read_fields(UpscaleBody, document, {})
        digest = body.digest(document)
        acceptance = await upscale(
            self._resources, caller, wanted.image_id, wanted.scale_factor, idempotency_key=key, body_sha256=digest
        )
        return _acknowledge(request, acceptance)

    async def _poll(self, request: Request) -> Response:
        key = credentials.bearer_key(request.headers)
        job_id = answers.job_id(request.path_params["request_id"], "gen", "up")
        job = await door.look(self._resources.accounts, request, key, Variant.A, job_id, of=Variant.A)
        if job is None:
            raise NotFound("There is no such request.")
        base_url = answers.base_address(request, self._resources.settings.public_url)
        record = status_record(job, partial(self._resources.images.url, base_url=base_url))
        return JSONResponse(record, headers=answers.poll_again(job))

    async def _admit(self, request: Request) -> Caller:
        return await door.admit(self._resources.accounts, request, credentials.bearer_key(request.headers), Variant.A)

    def _refuse(self, request: Request, error: AtelierError) -> Response:
        status = _STATUS.get(type(error))
        if status is None:  # not a caller's mistake: the edge answers
            raise error
        headers = door.retry_after(request, error)
        if status == 401:
            headers["WWW-Authenticate"] = CHALLENGE
        return answers.refusal(status, error.code, error.message, headers)


def _acknowledge(request: Request, acceptance: Acceptance) -> Response:
    job = acceptance.job
    headers = {
        "Location": answers.local_path(request.scope, f"/v1/generate/{job.id}"),
        "Retry-After": str(answers.POLL_EVERY_S),
    }
    if acceptance.replayed:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(acknowledgement(job), status_code=202, headers=headers)
