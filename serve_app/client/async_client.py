"""The client for asyncio: the methods of `Client`, awaited. A notebook shows its pictures by their addresses."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from serve_app.client.calls import WAIT_S, AccountCalls, ImageCalls, JobCalls
from serve_app.client.display import Cell, grid_html
from serve_app.client.errors import sends_events
from serve_app.client.lora_calls import LoraCalls
from serve_app.client.pictures import PictureCalls, UploadedImage
from serve_app.client.protocol import Action, NextLine, Operation, Outcome, Sleep, Write, advance
from serve_app.client.records import BaseModel, Event, Lora, Model, PilPicture, Record, Usage

T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


class AsyncImage(ImageCalls[Awaited["AsyncImage"], Awaited[bytes], Awaited[Path], Awaited[PilPicture]]):
    """A finished image, to save, to enlarge or to open with Pillow."""

    def _repr_html_(self) -> str:
        return grid_html([Cell(self.url, self.caption, self.image_id)])


class AsyncJob(JobCalls[AsyncImage, Awaited["AsyncJob"], Awaited[None]]):
    """Follows a generation or an upscale to its images: `(await job.wait()).images[0]`."""

    _image = AsyncImage

    async def events(self, timeout: float | None = WAIT_S) -> AsyncIterator[Event]:  # noqa: ASYNC109 as in `Job`
        """Yield the state, and again whenever it changes, until the job ends; one that failed raises nothing here.

        An event with a `preview` has a small picture of an unfinished image. Raises `WaitTimeout` when nothing has
        changed for `timeout` seconds, a quarter of a minute later at most.
        """
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
        Awaited[list[Model]],
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

    async def execute(self, operation: Operation[T], outcome: Outcome = None) -> T:
        """Perform the calls and delays of an operation; returns its result. `outcome` is that of its last action."""
        try:
            while True:
                action = advance(operation, outcome)
                try:
                    outcome = await self._perform(action)
                except (
                    asyncio.CancelledError
                ) as canceled:  # in a task of its own, or anyio would cancel each next await
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
            response = await self._http.send(request, stream=action.is_stream)
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
