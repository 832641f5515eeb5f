"""Makes interface A's round trip with a generated client: accept, poll, upscale, download.

openapi-python-client generated it.
"""

# pyright: basic, reportMissingImports=false
import json
import sys
import time
from typing import Any

import httpx
from client_a import AuthenticatedClient
from client_a.api.generation import generate, get_request
from client_a.api.upscaling import upscale
from client_a.models import (
    Acknowledgement,
    CompletedRecord,
    ErrorResponse,
    GenerationRequest,
    GenerationRequestWidth,
    Image,
    ProcessingRecord,
    UpscaleRequest,
)


def first_image(client: AuthenticatedClient, accepted: Any) -> Image:
    assert isinstance(accepted, Acknowledgement), accepted
    request_id = accepted.request_id
    record = get_request.sync(request_id, client=client)
    while isinstance(record, ProcessingRecord):
        time.sleep(0.1)
        record = get_request.sync(request_id, client=client)
    assert isinstance(record, CompletedRecord), record
    return record.images[0]


def main(base_url: str, key: str, lora_id: str) -> None:
    client = AuthenticatedClient(base_url=base_url, token=key)
    wide = GenerationRequestWidth.VALUE_768
    body = GenerationRequest(prompt="purple mountains", lora_id=lora_id, width=wide, seed=7)
    small = first_image(client, generate.sync(client=client, body=body, idempotency_key="python-1"))
    large = first_image(client, upscale.sync(client=client, body=UpscaleRequest(image_id=small.image_id)))
    refused = generate.sync(client=client, body=GenerationRequest(prompt="x", lora_id=lora_id, steps=1))
    assert isinstance(refused, ErrorResponse)
    sys.stdout.write(json.dumps([large.width, refused.error.code.value, httpx.get(large.url).headers["content-type"]]))


main(*sys.argv[1:])
