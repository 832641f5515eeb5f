"""Makes interface B's round trip with a generated client: list models, accept, poll, download.

openapi-python-client generated it.
"""

# pyright: basic, reportMissingImports=false
import json
import sys
import time

import httpx
from client_b import AuthenticatedClient
from client_b.api.generation import generate, get_run
from client_b.api.models import list_models
from client_b.models import (
    Acknowledgement,
    CompletedRun,
    ErrorResponse,
    GenerationRequest,
    Models,
    ProcessingRun,
    QueuedRun,
)


def main(base_url: str, key: str) -> None:
    client = AuthenticatedClient(base_url=base_url, token=key, prefix="", auth_header_name="X-API-Key")
    listed = list_models.sync(client=client)
    assert isinstance(listed, Models), listed
    body = GenerationRequest(positive_prompt="purple mountains", negative_prompt="green", model_id=listed.models[0].id)
    accepted = generate.sync(client=client, body=body)
    assert isinstance(accepted, Acknowledgement), accepted
    run = get_run.sync(accepted.run_id, client=client)
    while isinstance(run, QueuedRun | ProcessingRun):
        time.sleep(0.1)
        run = get_run.sync(accepted.run_id, client=client)
    assert isinstance(run, CompletedRun), run
    body.guidance = 21
    refused = generate.sync(client=client, body=body)
    assert isinstance(refused, ErrorResponse)
    sys.stdout.write(
        json.dumps([run.progress, refused.error.code.value, httpx.get(run.image_url).headers["content-type"]])
    )


main(*sys.argv[1:])
