"""The synchronous client, for scripts and notebooks.

`client.loras`: the LoRAs that an account may use, and its own.
"""

import time
from collections.abc import Callable, Sequence
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
from serve_app.client.upload import TIMEOUT, OnSent, Timeout, read_timeout, sent_body, timeout_of, upload_progress

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage


class Loras:
    """The LoRAs that this account may use, and its own, with either interface's key."""

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Any]) -> None:
        self._loras, self._execute = LoraService(service), execute

    def list(self, *, base_model: str | None = None, q: str | None = None) -> list[Lora]:
        """List the LoRAs, newest first; of one base model, or with `q` in name, description or trigger words."""
        return self._execute(self._loras.list(base_model, q))

    def get(self, lora_id: str) -> Lora:
        """Return one LoRA. Raises `NotFound`."""
        return self._execute(self._loras.get(lora_id))

    def add(
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
            return self._execute(self._loras.add_from(path, source, fields, on_sent, idempotency_key))

    def update(
        self, lora_id: str, *, name: str | None = None, description: str | None = None,
        trigger_words: Sequence[str] | None = None,
    ) -> Lora:  # fmt: skip
        """Change what is given of an own one. Raises `NotFound`."""
        return self._execute(self._loras.update(lora_id, changed_fields(name, description, trigger_words)))

    def delete(self, lora_id: str) -> None:
        """Delete an own one: jobs that wait for it or run with it end as failed. Raises `NotFound`."""
        self._execute(self._loras.delete(lora_id))

    def share(self, lora_id: str, account: str) -> Lora:
        """Let another account, by its id or name, use an own one. Raises `NotFound`."""
        return self._execute(self._loras.share(lora_id, account))

    def unshare(self, lora_id: str, account: str) -> None:
        """End what `share` began. Raises `NotFound`."""
        self._execute(self._loras.unshare(lora_id, account))


T = TypeVar("T")
RETRY_BUDGET_S = 30.0


class Image(ImageInfo):
    """A finished image, to download or to open with Pillow."""

    def __init__(self, client: "Client", record: Record, index: int) -> None:
        super().__init__(record.images[index])
        self._client, self._record, self._index = client, record, index

    def download(self, path: str | Path | None = None) -> bytes:
        """The PNG's bytes, also written to `path` when one is given."""
        png = self._client.execute(self._client.service.download(self._record, self._index))
        if path is not None:
            Path(path).write_bytes(png)
        return png

    def pil(self) -> "PilImage":
        """The picture as a Pillow image; needs `pip install pillow`."""
        return open_png(self.download())


class Job(JobState):
    """Follows a generation or an upscale to its images: `job.wait().images[0].pil()`."""

    def __init__(self, client: "Client", record: Record) -> None:
        super().__init__(record)
        self._client = client

    @property
    def images(self) -> list[Image]:
        """The finished images; empty until the job is completed."""
        return [Image(self._client, self._record, index) for index in range(len(self._record.images))]

    def refresh(self) -> Self:
        """Poll the job once."""
        self._update(self._client.execute(self._client.service.record(self.id, self._record.interface)))
        return self

    def wait(self, timeout: float | None = 600.0, on_progress: OnProgress | None = None) -> Self:
        """Return when the images are ready. Raises `JobFailed`, or `WaitTimeout` after `timeout` seconds."""
        on_record = self._recorder(on_progress)
        waiting = self._client.service.wait(self._record, timeout, on_record, shows_progress=on_progress is not None)
        on_record(self._client.execute(waiting))
        return self

    def cancel(self) -> Self:
        """Cancel the job: at once while it waits, at its next step while it runs.

        One that has ended stays as it is.
        """
        self._update(self._client.execute(cancel_job(self._client.service, self.id)))
        return self

    def delete(self) -> None:
        """Delete the job, which must have ended, with its prompt and its images."""
        self._client.delete(self.id)


class Client:
    """Client of one service with one key, on interface "a" (bearer key) or "b" (X-API-Key).

    A call without an answer, or answered with 429, 5xx or a proxy's own 404, is retried, honouring `Retry-After`, while
    the delays add up to at most `retry_budget` seconds; of those, an address at which nothing has ever answered gets
    three. Every creating call sends an idempotency key, so a retry never creates a second job. `timeout` is how long an
    answer may take: seconds, a `timedelta`, or httpx's own. A `/v1` at the end of `base_url` is left out. Errors: see
    `errors.py`.
    """

    def __init__(
        self, base_url: str, key: str, *, interface: Interface = "a", retry_budget: float = RETRY_BUDGET_S,
        timeout: Timeout = TIMEOUT, transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        timeout = read_timeout(timeout)
        self.service = Service(
            base_url=base_url, key=key, interface=interface, retry_budget=retry_budget, longest_wait=longest_wait(timeout),
        )  # fmt: skip
        self._http = httpx.Client(timeout=timeout, transport=transport)
        self.loras = Loras(self.service, self.execute)
        """List, add, change, share and delete LoRAs."""

    def generate(
        self, prompt: str, *, lora_id: str, lora_weight: float | None = None, guidance_scale: float | None = None, seed: int | None = None,
        width: int | None = None, height: int | None = None, steps: int | None = None, num_images: int | None = None,
        negative_prompt: str | None = None, idempotency_key: str | None = None,
    ) -> Job:  # fmt: skip
        """Start a job that draws `prompt` with the LoRA adapter `lora_id`.

        Options left out take the service's defaults. `steps` and `num_images` belong to interface A, `negative_prompt`
        to B: `UnsupportedOption` on the other.
        """
        options = {
            "prompt": prompt, "lora_id": lora_id, "lora_weight": lora_weight, "guidance_scale": guidance_scale, "seed": seed, "width": width,
            "height": height, "steps": steps, "num_images": num_images, "negative_prompt": negative_prompt,
        }  # fmt: skip
        return Job(self, self.execute(self.service.generate(idempotency_key, options)))

    def upscale(self, image_id: str, scale_factor: int | None = None, *, idempotency_key: str | None = None) -> Job:
        """Start a job that enlarges an image 2 or 4 times. Part of interface A: the key must be valid there."""
        return Job(self, self.execute(self.service.upscale(idempotency_key, image_id, scale_factor)))

    def models(self) -> list[Model]:
        """The adapters this account may use. Part of interface B: the key must be valid there."""
        return self.execute(self.service.models())

    def run(self, run_id: str) -> Job:
        """Return a job that was started earlier, by its id."""
        return Job(self, self.execute(self.service.record(run_id)))

    def jobs(self, limit: int = 20) -> list[Job]:
        """The account's newest jobs of both interfaces, newest first.

        `job.request` says what was asked for.
        """
        return [Job(self, record) for record in self.execute(list_jobs(self.service, limit))]

    def cancel(self, run_id: str) -> Job:
        """Cancel a job by its id, as `job.cancel()` does. Raises `NotFound`."""
        return Job(self, self.execute(cancel_job(self.service, run_id)))

    def usage(self, days: int = 30) -> list[Usage]:
        """What completed jobs used in the last days (UTC, at most 366), by day, key and LoRA.

        The oldest is first.
        """
        return self.execute(usage(self.service, days))

    def delete_image(self, run_id: str, image_id: str) -> None:
        """Delete one image of a job; with its last image goes the job. Raises `NotFound`."""
        self.execute(delete_image(self.service, run_id, image_id))

    def delete(self, run_id: str) -> None:
        """Delete a job that has ended, with its prompt and its images.

        Raises `NotFound`, and `Conflict` while it has not ended.
        """
        self.execute(self.service.delete(run_id))

    def execute(self, operation: Operation[T]) -> T:
        """Perform the calls and delays of an operation; returns its result."""
        try:
            action = next(operation)
            while True:
                if isinstance(action, Sleep):
                    time.sleep(action.seconds)
                    action = operation.send(None)
                    continue
                try:
                    response = self._send(action)
                except httpx.TransportError as error:
                    action = operation.throw(error)
                else:
                    action = operation.send(response)
        except StopIteration as end:
            return end.value

    def _send(self, call: Call) -> httpx.Response:
        with sent_body(call.upload) as body:
            timeout = timeout_of(call.timeout, call.most, self._http.timeout)
            return self._http.request(
                call.method, call.url, headers=call.headers, json=call.json, timeout=timeout, **body
            )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
