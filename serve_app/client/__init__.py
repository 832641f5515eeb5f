"""The Python SDK: `Client`, and `AsyncClient` for asyncio. Needs httpx, and Pillow only for `.pil()`.

    from serve_app.client import Client

    client = Client("http://127.0.0.1:8000", key)  # key: one that `make run` or `atelier keys create` prints
    neon = client.models()[0]
    job = client.generate("purple mountains under a black sky with a yellow moon", lora_id=neon.id, seed=7)
    job.wait(on_progress=print).images[0].pil()

    ink = client.loras.add("ink.safetensors", base="pocket", progress=True)

    for job in client.jobs(limit=100):
        print(job.id, job.status, job.request["prompt"])

`Client(…, interface="b")` uses interface B with the same methods. All errors derive from `AtelierClientError`.
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
    Unreachable,
    UnsupportedOption,
    WaitTimeout,
)
from serve_app.client.protocol import GenerationOptions
from serve_app.client.records import Lora, Model, Usage
from serve_app.client.sync_client import Client, Image, Job
from serve_app.client.upload import upload_bar

__all__ = [
    "AsyncClient",
    "AsyncImage",
    "AsyncJob",
    "AtelierClientError",
    "Client",
    "Conflict",
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
    "RateLimited",
    "RunCanceled",
    "RunExpired",
    "RunFailed",
    "ServiceError",
    "ServiceUnavailable",
    "Unauthorized",
    "UnexpectedAnswer",
    "Unreachable",
    "UnsupportedOption",
    "Usage",
    "WaitTimeout",
    "upload_bar",
]
