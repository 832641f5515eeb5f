"""The SDK: `Client` waits, `AsyncClient` is awaited. Stands alone: needs httpx, and Pillow only for `.pil()`.

    from serve_app.client import Client

    client = Client("http://127.0.0.1:8000", key)
    run = client.generate("a lighthouse at dusk", lora_id=client.models()[0].id, seed=7)
    run.wait(on_progress=print).images[0].pil()

`Client(…, interface="b")` speaks the other interface; the calls stay the same. The errors are one tree: `errors.py`.
"""

from serve_app.client.awaiting import AsyncClient, AsyncImage, AsyncRun
from serve_app.client.blocking import Client, Image, Run
from serve_app.client.errors import (
    AtelierClientError,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    RateLimited,
    RunCanceled,
    RunExpired,
    RunFailed,
    ServiceError,
    ServiceUnavailable,
    Unauthorized,
    Unreachable,
    UnsupportedOption,
    WaitTimeout,
)
from serve_app.client.records import Model

__all__ = [
    "AsyncClient",
    "AsyncImage",
    "AsyncRun",
    "AtelierClientError",
    "Client",
    "Conflict",
    "Forbidden",
    "Image",
    "InvalidRequest",
    "Model",
    "NotFound",
    "RateLimited",
    "Run",
    "RunCanceled",
    "RunExpired",
    "RunFailed",
    "ServiceError",
    "ServiceUnavailable",
    "Unauthorized",
    "Unreachable",
    "UnsupportedOption",
    "WaitTimeout",
]
