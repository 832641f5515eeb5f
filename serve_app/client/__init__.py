"""The Python SDK: `Client`, and `AsyncClient` for asyncio. Needs httpx, and Pillow only for its images.

    from serve_app.client import Client

    client = Client()  # by ATELIER_URL and ATELIER_KEY, or the service that `make run` started in this folder
    image = client.generate("purple mountains under a black sky", loras={"neon": 0.8}, seed=7).images[0]
    image.save("mountains.png")
    image.upscale(4).save("large.png")

    client.generate("a boat", loras={"neon": 0.6, "stripes": 0.4}, sampler="dpm++2m-karras", steps=20, width=768)
    client.generate("a harbour at night", image="photo.jpg", strength=0.6)  # or bytes, a Pillow image, image itself
    jobs = client.map(["a boat", "a red flower"], loras="neon", seeds=[1, 2])

    ink = client.loras.add("ink.safetensors", base="pocket", progress=True)
    job = client.generate("a boat", lora_id=ink.id)  # started, and not waited for
    for event in job.events():
        print(event.status, event.progress)

`Client(…, interface="b")` does the same with a key of interface B. The SDK's own errors derive from
`AtelierClientError`; a wrong call raises `ValueError` or `TypeError`, and a file that cannot be read or written `OSError`.
"""

from serve_app.client.clients import AsyncClient, AsyncImage, AsyncJob, Client, Image, Job
from serve_app.client.errors import (
    AtelierClientError,
    Conflict,
    Forbidden,
    InvalidRequest,
    InvalidSignature,
    JobCanceled,
    JobExpired,
    JobFailed,
    NotFound,
    RateLimited,
    ServiceError,
    ServiceUnavailable,
    Unauthorized,
    UnexpectedAnswer,
    UnknownLora,
    Unreachable,
    WaitTimeout,
)
from serve_app.client.options import GenerationOptions, JobOptions
from serve_app.client.pictures import Picture, UploadedImage
from serve_app.client.records import BaseModel, Event, Lora, Preview, Usage
from serve_app.client.webhook_calls import Delivery, Webhook, verify_webhook

__all__ = [
    "AsyncClient",
    "AsyncImage",
    "AsyncJob",
    "AtelierClientError",
    "BaseModel",
    "Client",
    "Conflict",
    "Delivery",
    "Event",
    "Forbidden",
    "GenerationOptions",
    "Image",
    "InvalidRequest",
    "InvalidSignature",
    "Job",
    "JobCanceled",
    "JobExpired",
    "JobFailed",
    "JobOptions",
    "Lora",
    "NotFound",
    "Picture",
    "Preview",
    "RateLimited",
    "ServiceError",
    "ServiceUnavailable",
    "Unauthorized",
    "UnexpectedAnswer",
    "UnknownLora",
    "Unreachable",
    "UploadedImage",
    "Usage",
    "WaitTimeout",
    "Webhook",
    "verify_webhook",
]
