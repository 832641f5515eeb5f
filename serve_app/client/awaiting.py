"""The client for asyncio: the same calls, awaited."""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import httpx

from serve_app.client.blocking import PATIENCE_S, TIMEOUT
from serve_app.client.records import Model, Record
from serve_app.client.talk import Interface, Pause, Service, Talk
from serve_app.client.views import ImageView, OnProgress, RunView, open_png

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

T = TypeVar("T")


class AsyncImage(ImageView):
    def __init__(self, client: "AsyncClient", record: Record, index: int) -> None:
        super().__init__(record.images[index])
        self._client, self._record, self._index = client, record, index

    async def download(self, path: str | Path | None = None) -> bytes:
        """The PNG's bytes, also written to `path` when one is given."""
        png = await self._client.carry(self._client.service.download(self._record, self._index))
        if path is not None:
            await asyncio.to_thread(Path(path).write_bytes, png)
        return png

    async def pil(self) -> "PilImage":
        """The picture as a Pillow image; needs `pip install pillow`."""
        return open_png(await self.download())


class AsyncRun(RunView):
    """A generation or an upscale in the service: `(await run.wait()).images[0]`."""

    def __init__(self, client: "AsyncClient", record: Record) -> None:
        super().__init__(record)
        self._client = client

    @property
    def images(self) -> list[AsyncImage]:
        """The finished images; empty until the run is completed."""
        return [AsyncImage(self._client, self._record, index) for index in range(len(self._record.images))]

    async def refresh(self) -> Self:
        """Looks at the run once."""
        self._record = await self._client.carry(self._client.service.record(self.id, self._record.interface))
        return self

    async def wait(
        self,
        timeout: float | None = 600.0,  # noqa: ASYNC109 — bounds the polling, and is not a cancellation
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Returns when the images are there. Raises `RunFailed`, or `WaitTimeout` after `timeout` seconds."""
        see = self._observer(on_progress)
        see(await self._client.carry(self._client.service.finished(self._record, timeout, see)))
        return self


class AsyncClient:
    """`Client` for asyncio: same options, same errors, same repeats."""

    def __init__(
        self, base_url: str, key: str, *, interface: Interface = "a", patience: float = PATIENCE_S,
        timeout: httpx.Timeout = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        self.service = Service(base_url=base_url.rstrip("/"), key=key, interface=interface, patience=patience)
        self._http = httpx.AsyncClient(timeout=timeout, transport=transport)

    async def generate(
        self, prompt: str, *, lora_id: str, lora_weight: float | None = None, guidance_scale: float | None = None, seed: int | None = None,
        width: int | None = None, height: int | None = None, steps: int | None = None, num_images: int | None = None,
        negative_prompt: str | None = None, idempotency_key: str | None = None,
    ) -> AsyncRun:  # fmt: skip
        """Starts images from a prompt with the adapter `lora_id`. What is left out takes the service's default.

        `steps` and `num_images` belong to interface A, `negative_prompt` to B: `UnsupportedOption` on the other.
        """
        options = {
            "prompt": prompt, "lora_id": lora_id, "lora_weight": lora_weight, "guidance_scale": guidance_scale, "seed": seed, "width": width,
            "height": height, "steps": steps, "num_images": num_images, "negative_prompt": negative_prompt,
        }  # fmt: skip
        return AsyncRun(self, await self.carry(self.service.generate(idempotency_key, options)))

    async def upscale(
        self, image_id: str, scale_factor: int | None = None, *, idempotency_key: str | None = None
    ) -> AsyncRun:
        """Starts a copy of an image, 2 or 4 times as large. An operation of interface A: the key must be valid there."""
        return AsyncRun(self, await self.carry(self.service.upscale(idempotency_key, image_id, scale_factor)))

    async def models(self) -> list[Model]:
        """The adapters this account may use. An operation of interface B: the key must be valid there."""
        return await self.carry(self.service.models())

    async def run(self, run_id: str) -> AsyncRun:
        """A run started earlier, here or elsewhere."""
        return AsyncRun(self, await self.carry(self.service.record(run_id)))

    async def carry(self, talk: Talk[T]) -> T:
        """Carries a conversation through to its result."""
        try:
            wish = next(talk)
            while True:
                if isinstance(wish, Pause):
                    await asyncio.sleep(wish.seconds)
                    wish = talk.send(None)
                    continue
                try:
                    response = await self._http.request(wish.method, wish.url, headers=wish.headers, json=wish.json)
                except httpx.TransportError as error:
                    wish = talk.throw(error)
                else:
                    wish = talk.send(response)
        except StopIteration as end:
            return end.value

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
