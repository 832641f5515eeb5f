"""The two clients: a synchronous one, for scripts and notebooks, and one for asyncio, with the same methods awaited."""

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from serve_app.client.calls import WAIT_S, AccountCalls, ImageCalls, JobCalls
from serve_app.client.display import Cell, grid_html
from serve_app.client.errors import sends_events
from serve_app.client.lora_calls import LoraCalls
from serve_app.client.pictures import PictureCalls, UploadedImage
from serve_app.client.protocol import Action, NextLine, Operation, Outcome, Sleep, Write, advance
from serve_app.client.records import BaseModel, Event, Lora, PilPicture, Record, Usage
from serve_app.client.webhook_calls import Delivery, Webhook, WebhookCalls

T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


class Image(ImageCalls["Image", bytes, Path, PilPicture]):
    """A finished image, to save, to enlarge or to open with Pillow."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {self.media_type: b64encode(self.download()).decode()}


class Job(JobCalls[Image, "Job", None]):
    """Follows a generation or an upscale to its images: `job.wait().images[0].pil()`."""

    _image = Image

    def events(self, timeout: float | None = WAIT_S) -> Iterator[Event]:
        """Yield the state, and again whenever it changes, until the job ends; one that failed raises nothing here.

        An event with a `preview` has a small picture of an unfinished image. Raises `WaitTimeout` when nothing has
        changed for `timeout` seconds, a quarter of a minute later at most.
        """
        yield self.event
        following = self._following(httpx.Response.iter_lines)
        try:
            while not self.done:
                yield self._client.execute(following.next(timeout))
        finally:
            if following.response is not None:
                following.response.close()

    def _embedded(self, image: Image) -> str:
        """Return the picture itself, which a notebook still shows when the service has forgotten it."""
        return f"data:{image.media_type};base64,{b64encode(image.download()).decode()}"


class Client(AccountCalls[httpx.BaseTransport, Job, list[Job], list[BaseModel], list[Usage], None]):
    """Client of one service with one key, which is sent as interface "a" (bearer key) or "b" (X-API-Key) wants it.

    A call without an answer, or answered with 429, 5xx or a proxy's own 404, is retried, honoring `Retry-After`, while
    the delays add up to at most `retry_budget` seconds, or three where nothing has ever answered at the address. Every
    creating call sends an idempotency key, so a retry never creates a second job. `timeout` is how long an answer may
    take: seconds, a `timedelta`, httpx's own, None for any. A `/v1` at the end of `base_url` is left out.
    """

    _http: httpx.Client
    _http_client = httpx.Client
    loras: LoraCalls[Lora, list[Lora], None]
    images: PictureCalls[UploadedImage, list[UploadedImage], None]
    webhooks: WebhookCalls[Webhook, list[Webhook], Delivery, list[Delivery], None]

    def execute(self, operation: Operation[T]) -> T:
        """Perform the calls and delays of an operation; returns its result."""
        outcome = None
        try:
            while True:
                action = advance(operation, outcome)
                try:
                    outcome = self._perform(action)
                except BaseException as error:  # noqa: BLE001 the operation raises it, and may cancel jobs before
                    outcome = error
        except StopIteration as end:
            return end.value

    def _perform(self, action: Action) -> Outcome:
        if isinstance(action, Sleep):
            return time.sleep(action.seconds)
        if isinstance(action, NextLine):
            return next(action.lines, None)
        if isinstance(action, Write):
            action.path.write_bytes(action.content)
            return None
        with action.built(self._http) as request:
            response = self._http.send(request, stream=action.is_stream, follow_redirects=action.is_elsewhere)
        if action.is_stream and not sends_events(response):
            response.read()
        return response

    def _job(self, record: Record, *, is_begun: bool = False) -> Job:
        return Job(self, record, is_begun=is_begun)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncImage(ImageCalls[Awaited["AsyncImage"], Awaited[bytes], Awaited[Path], Awaited[PilPicture]]):
    """A finished image; a notebook shows it by its address."""

    def _repr_html_(self) -> str:
        return grid_html([Cell(self.url, self.caption, self.image_id)])


class AsyncJob(JobCalls[AsyncImage, Awaited["AsyncJob"], Awaited[None]]):
    """Follows a generation or an upscale to its images: `(await job.wait()).images[0]`."""

    _image = AsyncImage

    async def events(self, timeout: float | None = WAIT_S) -> AsyncIterator[Event]:  # noqa: ASYNC109 as in `Job`
        """Yield events as `Job.events` does."""
        yield self.event
        following = self._following(httpx.Response.aiter_lines)
        try:
            while not self.done:
                yield await self._client.execute(following.next(timeout))
        finally:
            if following.response is not None:
                await following.response.aclose()

    def _embedded(self, image: AsyncImage) -> str:
        return image.url


class AsyncClient(
    AccountCalls[
        httpx.AsyncBaseTransport,
        Awaited[AsyncJob],
        Awaited[list[AsyncJob]],
        Awaited[list[BaseModel]],
        Awaited[list[Usage]],
        Awaited[None],
    ]
):
    """`Client` for asyncio: same options, same errors, same retries."""

    _http: httpx.AsyncClient
    _http_client = httpx.AsyncClient
    loras: LoraCalls[Awaited[Lora], Awaited[list[Lora]], Awaited[None]]
    images: PictureCalls[Awaited[UploadedImage], Awaited[list[UploadedImage]], Awaited[None]]
    webhooks: WebhookCalls[
        Awaited[Webhook], Awaited[list[Webhook]], Awaited[Delivery], Awaited[list[Delivery]], Awaited[None]
    ]

    async def execute(self, operation: Operation[T], outcome: Outcome = None) -> T:
        """Perform the calls and delays of an operation; returns its result. `outcome` is that of its last action."""
        try:
            while True:
                action = advance(operation, outcome)
                try:
                    outcome = await self._perform(action)
                except asyncio.CancelledError as canceled:  # the rest is a task, or anyio would cancel each next await
                    return await asyncio.shield(asyncio.create_task(self.execute(operation, canceled)))
                except BaseException as error:  # noqa: BLE001 the operation raises it, and may cancel jobs before
                    outcome = error
        except StopIteration as end:
            return end.value

    async def _perform(self, action: Action) -> Outcome:
        if isinstance(action, Sleep):
            return await asyncio.sleep(action.seconds)
        if isinstance(action, NextLine):
            return await anext(action.lines, None)
        if isinstance(action, Write):
            await asyncio.to_thread(action.path.write_bytes, action.content)
            return None
        with action.built(self._http) as request:
            response = await self._http.send(request, stream=action.is_stream, follow_redirects=action.is_elsewhere)
        if action.is_stream and not sends_events(response):
            await response.aread()
        return response

    def _job(self, record: Record, *, is_begun: bool = False) -> AsyncJob:
        return AsyncJob(self, record, is_begun=is_begun)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
