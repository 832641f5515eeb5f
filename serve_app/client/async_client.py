"""The client for asyncio: the methods of `Client`, awaited.

`client.loras` for asyncio: the methods of `Loras`, awaited.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from serve_app.client.calls import (
    LoraService,
    base_of,
    cancel_job,
    changed_fields,
    delete_image,
    described,
    list_jobs,
    usage,
)
from serve_app.client.protocol import Call, Interface, Operation, Service, Sleep, longest_wait
from serve_app.client.records import ImageInfo, JobState, Lora, Model, OnProgress, Record, Usage, open_png
from serve_app.client.sync_client import RETRY_BUDGET_S
from serve_app.client.upload import TIMEOUT, OnSent, Timeout, read_timeout, sent_body, timeout_of, upload_progress

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage


class AsyncLoras:
    """The LoRAs that this account may use, and its own, with either interface's key."""

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Awaitable[Any]]) -> None:
        self._loras, self._execute = LoraService(service), execute

    async def list(self, *, base_model: str | None = None, q: str | None = None) -> list[Lora]:
        """List the LoRAs, newest first; of one base model, or with `q` in name, description or trigger words."""
        return await self._execute(self._loras.list(base_model, q))

    async def get(self, lora_id: str) -> Lora:
        """Return one LoRA. Raises `NotFound`."""
        return await self._execute(self._loras.get(lora_id))

    async def add(
        self, path: str | Path | None = None, *, source: str | None = None, base: str | None = None, base_model: str | None = None,
        name: str | None = None, description: str = "", trigger_words: Sequence[str] = (), progress: bool = False,
        on_progress: OnSent | None = None, idempotency_key: str | None = None,
    ) -> Lora:  # fmt: skip
        """Upload a safetensors file, or a folder as PEFT saves one, for the base model `base`.

        It can be used at once. With `source` in place of a path the service fetches it, from where its operator allows: `s3://…`, `hf://…`.
        `progress` shows a bar of the upload; `on_progress` is called with the bytes sent and the bytes in all. Weights that the
        account has already give the LoRA that has them, and are not sent again from 8 MiB on. `base_model` is another name of
        `base`. Raises `InvalidRequest` with the reason for a file that does not fit, `Conflict` over the plan's quota.
        """
        fields = described(name, path or source or "", base_of(base, base_model), description, trigger_words)
        with upload_progress(fields["name"], on_progress, shows_bar=progress) as on_sent:
            return await self._execute(self._loras.add_from(path, source, fields, on_sent, idempotency_key))

    async def update(
        self, lora_id: str, *, name: str | None = None, description: str | None = None,
        trigger_words: Sequence[str] | None = None,
    ) -> Lora:  # fmt: skip
        """Change what is given of an own one. Raises `NotFound`."""
        return await self._execute(self._loras.update(lora_id, changed_fields(name, description, trigger_words)))

    async def delete(self, lora_id: str) -> None:
        """Delete an own one: jobs that wait for it or run with it end as failed. Raises `NotFound`."""
        await self._execute(self._loras.delete(lora_id))

    async def share(self, lora_id: str, account: str) -> Lora:
        """Let another account, by its id or name, use an own one. Raises `NotFound`."""
        return await self._execute(self._loras.share(lora_id, account))

    async def unshare(self, lora_id: str, account: str) -> None:
        """End what `share` began. Raises `NotFound`."""
        await self._execute(self._loras.unshare(lora_id, account))


T = TypeVar("T")


class AsyncImage(ImageInfo):
    """A finished image, to download or to open with Pillow."""

    def __init__(self, client: "AsyncClient", record: Record, index: int) -> None:
        super().__init__(record.images[index])
        self._client, self._record, self._index = client, record, index

    async def download(self, path: str | Path | None = None) -> bytes:
        """The PNG's bytes, also written to `path` when one is given."""
        png = await self._client.execute(self._client.service.download(self._record, self._index))
        if path is not None:
            await asyncio.to_thread(Path(path).write_bytes, png)
        return png

    async def pil(self) -> "PilImage":
        """The picture as a Pillow image; needs `pip install pillow`."""
        return open_png(await self.download())


class AsyncJob(JobState):
    """Follows a generation or an upscale to its images: `(await job.wait()).images[0]`."""

    def __init__(self, client: "AsyncClient", record: Record) -> None:
        super().__init__(record)
        self._client = client

    @property
    def images(self) -> list[AsyncImage]:
        """The finished images; empty until the job is completed."""
        return [AsyncImage(self._client, self._record, index) for index in range(len(self._record.images))]

    async def refresh(self) -> Self:
        """Poll the job once."""
        self._update(await self._client.execute(self._client.service.record(self.id, self._record.interface)))
        return self

    async def wait(
        self,
        timeout: float | None = 600.0,  # noqa: ASYNC109 — bounds the polling, and is not a cancellation
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Return when the images are ready. Raises `JobFailed`, or `WaitTimeout` after `timeout` seconds."""
        on_record = self._recorder(on_progress)
        waiting = self._client.service.wait(self._record, timeout, on_record, shows_progress=on_progress is not None)
        on_record(await self._client.execute(waiting))
        return self

    async def cancel(self) -> Self:
        """Cancel the job: at once while it waits, at its next step while it runs.

        One that has ended stays as it is.
        """
        self._update(await self._client.execute(cancel_job(self._client.service, self.id)))
        return self

    async def delete(self) -> None:
        """Delete the job, which must have ended, with its prompt and its images."""
        await self._client.delete(self.id)


class AsyncClient:
    """`Client` for asyncio: same options, same errors, same retries."""

    def __init__(
        self, base_url: str, key: str, *, interface: Interface = "a", retry_budget: float = RETRY_BUDGET_S,
        timeout: Timeout = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        timeout = read_timeout(timeout)
        self.service = Service(
            base_url=base_url, key=key, interface=interface, retry_budget=retry_budget, longest_wait=longest_wait(timeout),
        )  # fmt: skip
        self._http = httpx.AsyncClient(timeout=timeout, transport=transport)
        self.loras = AsyncLoras(self.service, self.execute)
        """List, add, change, share and delete LoRAs."""

    async def generate(
        self, prompt: str, *, lora_id: str, lora_weight: float | None = None, guidance_scale: float | None = None, seed: int | None = None,
        width: int | None = None, height: int | None = None, steps: int | None = None, num_images: int | None = None,
        negative_prompt: str | None = None, idempotency_key: str | None = None,
    ) -> AsyncJob:  # fmt: skip
        """Start a job that draws `prompt` with the LoRA adapter `lora_id`.

        Options left out take the service's defaults. `steps` and `num_images` belong to interface A, `negative_prompt`
        to B: `UnsupportedOption` on the other.
        """
        options = {
            "prompt": prompt, "lora_id": lora_id, "lora_weight": lora_weight, "guidance_scale": guidance_scale, "seed": seed, "width": width,
            "height": height, "steps": steps, "num_images": num_images, "negative_prompt": negative_prompt,
        }  # fmt: skip
        return AsyncJob(self, await self.execute(self.service.generate(idempotency_key, options)))

    async def upscale(
        self, image_id: str, scale_factor: int | None = None, *, idempotency_key: str | None = None
    ) -> AsyncJob:
        """Start a job that enlarges an image 2 or 4 times. Part of interface A: the key must be valid there."""
        return AsyncJob(self, await self.execute(self.service.upscale(idempotency_key, image_id, scale_factor)))

    async def models(self) -> list[Model]:
        """The adapters this account may use. Part of interface B: the key must be valid there."""
        return await self.execute(self.service.models())

    async def run(self, run_id: str) -> AsyncJob:
        """Return a job that was started earlier, by its id."""
        return AsyncJob(self, await self.execute(self.service.record(run_id)))

    async def jobs(self, limit: int = 20) -> list[AsyncJob]:
        """The account's newest jobs of both interfaces, newest first.

        `job.request` says what was asked for.
        """
        return [AsyncJob(self, record) for record in await self.execute(list_jobs(self.service, limit))]

    async def cancel(self, run_id: str) -> AsyncJob:
        """Cancel a job by its id, as `job.cancel()` does. Raises `NotFound`."""
        return AsyncJob(self, await self.execute(cancel_job(self.service, run_id)))

    async def usage(self, days: int = 30) -> list[Usage]:
        """What completed jobs used in the last days (UTC, at most 366), by day, key and LoRA.

        The oldest is first.
        """
        return await self.execute(usage(self.service, days))

    async def delete_image(self, run_id: str, image_id: str) -> None:
        """Delete one image of a job; with its last image goes the job. Raises `NotFound`."""
        await self.execute(delete_image(self.service, run_id, image_id))

    async def delete(self, run_id: str) -> None:
        """Delete a job that has ended, with its prompt and its images.

        Raises `NotFound`, and `Conflict` while it has not ended.
        """
        await self.execute(self.service.delete(run_id))

    async def execute(self, operation: Operation[T]) -> T:
        """Perform the calls and delays of an operation; returns its result."""
        try:
            action = next(operation)
            while True:
                if isinstance(action, Sleep):
                    await asyncio.sleep(action.seconds)
                    action = operation.send(None)
                    continue
                try:
                    response = await self._send(action)
                except httpx.TransportError as error:
                    action = operation.throw(error)
                else:
                    action = operation.send(response)
        except StopIteration as end:
            return end.value

    async def _send(self, call: Call) -> httpx.Response:
        with sent_body(call.upload) as body:
            timeout = timeout_of(call.timeout, call.most, self._http.timeout)
            return await self._http.request(
                call.method, call.url, headers=call.headers, json=call.json, timeout=timeout, **body
            )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
