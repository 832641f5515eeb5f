"""The client for asyncio: the methods of `Client`, awaited. A notebook shows its pictures by their addresses."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from serve_app.client.calls import RETRY_BUDGET_S, WAIT_S, AccountCalls, ImageCalls, JobCalls
from serve_app.client.display import Cell, grid_html
from serve_app.client.errors import sends_events
from serve_app.client.lora_calls import LoraCalls
from serve_app.client.pictures import PictureCalls, UploadedImage
from serve_app.client.protocol import Action, Interface, NextLine, Operation, Outcome, Sleep, advance
from serve_app.client.records import BaseModel, Event, Lora, Model, Record, Usage, open_picture
from serve_app.client.upload import TIMEOUT, Timeout, read_timeout, sent_body, timeout_of

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


class AsyncImage(ImageCalls[Awaited["AsyncImage"]]):
    """A finished image, to save, to enlarge or to open with Pillow."""

    async def download(self, path: str | Path | None = None) -> bytes:
        """The file's bytes, also written to `path` when one is given."""
        content = await self._client.execute(self._content())
        if path is not None:
            await asyncio.to_thread(Path(path).write_bytes, content)
        return content

    async def save(self, path: str | Path | None = None) -> Path:
        """Write the file to `path`, or under the image's id into the working directory; returns the file."""
        file = self._file(path)
        await self.download(file)
        return file

    async def pil(self) -> "PilImage":
        """The picture as a Pillow image; needs `pip install pillow`."""
        return open_picture(await self.download())

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
        Awaited[AsyncJob],
        Awaited[list[AsyncJob]],
        Awaited[list[Model]],
        Awaited[list[BaseModel]],
        Awaited[list[Usage]],
        Awaited[None],
    ]
):
    """`Client` for asyncio: same options, same errors, same retries."""

    def __init__(
        self,
        base_url: str | None = None,
        key: str | None = None,
        *,
        interface: Interface = "a",
        retry_budget: float = RETRY_BUDGET_S,
        timeout: Timeout = TIMEOUT,
        ready_file: Path | str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(base_url, key, interface, retry_budget, timeout, ready_file)
        self._http = httpx.AsyncClient(timeout=read_timeout(timeout), transport=transport)
        self.loras = LoraCalls[Awaited[Lora], Awaited[list[Lora]], Awaited[None]](self.service, self.execute)
        """List, add, change, share and delete LoRAs."""
        self.images = PictureCalls[Awaited[UploadedImage], Awaited[list[UploadedImage]], Awaited[None]](
            self.service, self.execute
        )
        """Upload and delete pictures to draw from."""

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
        timeout = timeout_of(action.timeout, action.most, self._http.timeout)
        with sent_body(action.upload) as body:
            request = self._http.build_request(
                action.method, action.url, headers=action.headers, json=action.json, timeout=timeout, **body
            )
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
