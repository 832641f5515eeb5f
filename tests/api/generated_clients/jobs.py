"""Makes the jobs document's round trip with a generated client: an upload, a job that begins from it, an upscale.

openapi-python-client generated it.
"""

# pyright: basic, reportMissingImports=false
import json
import sys
import time
from io import BytesIO
from typing import Any

import httpx
from client_jobs import AuthenticatedClient
from client_jobs.api.images import add_image
from client_jobs.api.jobs import create_job, follow_job, get_job, list_base_models
from client_jobs.api.webhooks import create_webhook
from client_jobs.models import (
    AddImageBody,
    BaseModels,
    CompletedJob,
    CreatedWebhook,
    ErrorResponse,
    GenerationFields,
    GenerationWish,
    GenerationWishMetadata,
    ImageFormat,
    LoraWish,
    NewWebhook,
    Priority,
    QueuedJob,
    RunningJob,
    UploadedImage,
    UpscaleFields,
    UpscaleWish,
)
from client_jobs.types import File


def completed(client: AuthenticatedClient, job: Any) -> CompletedJob:
    while isinstance(job, QueuedJob | RunningJob):
        time.sleep(0.1)
        job = get_job.sync(job.id, client=client)
    assert isinstance(job, CompletedJob), job
    return job


def main(base_url: str, key: str, *loras: str) -> None:
    client = AuthenticatedClient(base_url=base_url, token=key)
    offered = list_base_models.sync(client=client)
    assert isinstance(offered, BaseModels), offered
    webhook = create_webhook.sync(client=client, body=NewWebhook(url="https://1.1.1.1/told"))
    assert isinstance(webhook, CreatedWebhook), webhook
    wish = GenerationWish(
        prompt="purple mountains",
        negative_prompt="green",
        base_model=offered.base_models[0].id,
        loras=[LoraWish(id=lora, weight=0.5) for lora in loras],
        sampler="dpm++2m-karras",
        steps=7,
        width=320,
        num_images=2,
        seed=7,
        output_format=ImageFormat.WEBP,
        priority=Priority.LOW,
        start_within=60,
        metadata=GenerationWishMetadata.from_dict({"order": "4711"}),
    )
    drawn = completed(client, create_job.sync(client=client, body=wish, idempotency_key="python-2"))
    asked = drawn.request
    assert isinstance(asked, GenerationFields), asked
    sent = wish.to_dict()
    del sent["seed"]
    assert sent.items() <= asked.to_dict().items()
    assert GenerationWish.from_dict(sent).output_format is asked.output_format, "both are of one type"
    assert [image.seed for image in drawn.images] == asked.seeds == ["7", "8"]
    assert drawn.finished_at, "a job that has ended"

    picture = BytesIO(httpx.get(drawn.images[0].url).content)
    added = add_image.sync(client=client, body=AddImageBody(file=File(picture, "mountains.webp", "image/webp")))
    assert isinstance(added, UploadedImage), added
    begun = GenerationWish(prompt="blue mountains", image_id=added.id, strength=0.5, mask_image_id=added.id)
    second = completed(client, create_job.sync(client=client, body=begun, prefer="wait=20"))
    assert isinstance(second.request, GenerationFields)
    assert (second.request.image_id, second.request.strength) == (added.id, 0.5)

    larger = completed(client, create_job.sync(client=client, body=UpscaleWish(kind="upscale", image_id=added.id)))
    assert isinstance(larger.request, UpscaleFields)
    assert "event: end" in str(follow_job.sync(larger.id, client=client))
    refused = create_job.sync(client=client, body=GenerationWish(prompt="x", strength=0.5))
    assert isinstance(refused, ErrorResponse)
    media_type = httpx.get(drawn.images[1].url).headers["content-type"]
    sys.stdout.write(json.dumps([larger.images[0].width, refused.error.code.value, media_type]))


main(*sys.argv[1:])
