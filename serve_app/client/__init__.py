"""The Python SDK: `Client`, and `AsyncClient` for asyncio. Needs httpx, and Pillow only for `.pil()`.

    from serve_app.client import Client

    client = Client()  # by ATELIER_URL and ATELIER_KEY, or the service that `make run` started in this folder
    image = client.generate("purple mountains under a black sky", loras={"neon": 0.8}, seed=7).images[0]
    image.save("mountains.png")
    image.upscale(4).save("large.png")

    jobs = client.map(["a boat", "a red flower"], loras="neon", seeds=[1, 2])

    ink = client.loras.add("ink.safetensors", base="pocket", progress=True)
    job = client.generate("a boat", lora_id=ink.id)  # started, and not waited for
    for event in job.events():
        print(event.status, event.progress)

`Client(…, interface="b")` uses interface B with the same methods. The SDK's own errors derive from
`AtelierClientError`; a wrong call raises `ValueError` or `TypeError`, and a file that cannot be read or written `OSError`.
"""

from serve_app.client.async_client import AsyncClient, AsyncImage, AsyncJob
from serve_app.client.errors import (
    AtelierClientError,
    Conflict,
    Forbidden,
    InvalidRequest,
    JobCanceled,
    JobExpired,
    JobFailed,
    NotFound,
    RateLimited,
    RunCanceled,
    RunExpired,
    RunFailed,
    ServiceError,
    ServiceUnavailable,
    Unauthorized,
    UnexpectedAnswer,
    UnknownLora,
    Unreachable,
    UnsupportedOption,
    WaitTimeout,
)
from serve_app.client.protocol import GenerationOptions
from serve_app.client.records import Event, Lora, Model, Preview, Usage
from serve_app.client.sync_client import Client, Image, Job
from serve_app.client.upload import upload_bar

__all__ = [
    "AsyncClient",
    "AsyncImage",
    "AsyncJob",
    "AtelierClientError",
    "Client",
    "Conflict",
    "Event",
    "Forbidden",
    "GenerationOptions",
    "Image",
    "InvalidRequest",
    "Job",
    "JobCanceled",
    "JobExpired",
    "JobFailed",
    "Lora",
    "Model",
    "NotFound",
    "Preview",
    "RateLimited",
    "RunCanceled",
    "RunExpired",
    "RunFailed",
    "ServiceError",
    "ServiceUnavailable",
    "Unauthorized",
    "UnexpectedAnswer",
    "UnknownLora",
    "Unreachable",
    "UnsupportedOption",
    "Usage",
    "WaitTimeout",
    "upload_bar",
]
