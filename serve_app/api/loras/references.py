"""Reads the JSON body of `POST /v1/loras`, which refers to weights instead of sending them."""

from contextlib import AsyncExitStack

from starlette.requests import Request

from serve_app.api.dependencies import resources_of
from serve_app.api.json_body import read_json
from serve_app.api.lora_form import LoraReference
from serve_app.api.lora_upload import fetch_source
from serve_app.api.routing import validate
from serve_app.domain.errors import InvalidParameter
from serve_app.service import loras
from serve_app.service.register import Registered


async def add_reference(
    request: Request, by: loras.AccountActor, *, place: AsyncExitStack, idempotency_key: str | None
) -> Registered:
    """Register weights that the account has sent before, or at an address that the operator allows."""
    resources, reference = resources_of(request), await _read(request)
    if reference.sha256 is not None:
        return await loras.add_known(
            resources, by, reference.sha256, reference.to_offer(), place=place, idempotency_key=idempotency_key
        )
    path = await fetch_source(request, reference.source or "", place)
    return await loras.add(resources, by, path, reference.to_offer(), place=place, idempotency_key=idempotency_key)


async def _read(request: Request) -> LoraReference:
    """Read it. Raises `PayloadTooLarge`, `UnsupportedMediaType`, `InvalidJson`, `InvalidParameter`."""
    reference = validate(LoraReference, await (await read_json(request)).json())
    if (reference.sha256 is None) == (reference.source is None):
        raise InvalidParameter("body: send either sha256 or source, or the file as a multipart form")
    return reference
