"""The client for scripts and notebooks: every call waits for its answer."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import httpx

from serve_app.client.records import Model, Record
from serve_app.client.talk import Interface, Pause, Service, Talk
from serve_app.client.views import ImageView, OnProgress, RunView, open_png

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

T = TypeVar("T")
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
PATIENCE_S = 30.0


class Image(ImageView):
    def __init__(self, client: "Client", record: Record, index: int) -> None:
        super().__init__(record.images[index])
        self._client, self._record, self._index = client, record, index

    def download(self, path: str | Path | None = None) -> bytes:
        """The PNG's bytes, also written to `path` when one is given."""
        png = self._client.carry(self._client.service.download(self._record, self._index))
        if path is not None:
            Path(path).write_bytes(png)
        return png

    def pil(self) -> "PilImage":
        """The picture as a Pillow image; needs `pip install pillow`."""
        return open_png(self.download())


class Run(RunView):
    """A generation or an upscale in the service: `run.wait().images[0].pil()`."""

    def __init__(self, client: "Client", record: Record) -> None:
        super().__init__(record)
        self._client = client

    @property
    def images(self) -> list[Image]:
        """The finished images; empty until the run is completed."""
        return [Image(self._client, self._record, index) for index in range(len(self._record.images))]

    def refresh(self) -> Self:
        """Looks at the run once."""
        self._record = self._client.carry(self._client.service.record(self.id, self._record.interface))
        return self

    def wait(self, timeout: float | None = 600.0, on_progress: OnProgress | None = None) -> Self:
        """Returns when the images are there. Raises `RunFailed`, or `WaitTimeout` after `timeout` seconds."""
        see = self._observer(on_progress)
        see(self._client.carry(self._client.service.finished(self._record, timeout, see)))
        return self


class Client:
    """Speaks to one service with one key, in the words of interface "a" (bearer key) or "b" (X-API-Key).

    A call that meets 429, 5xx, a proxy without the service or no answer is repeated for up to `patience` seconds of pauses, honouring `Retry-After`;
    an idempotency key travels with every creation, so a repeat never makes a second run. Errors: see `errors.py`.
    """

    def __init__(
        self, base_url: str, key: str, *, interface: Interface = "a", patience: float = PATIENCE_S,
        timeout: httpx.Timeout = TIMEOUT, transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self.service = Service(base_url=base_url.rstrip("/"), key=key, interface=interface, patience=patience)
        self._http = httpx.Client(timeout=timeout, transport=transport)

    def generate(
        self, prompt: str, *, lora_id: str, lora_weight: float | None = None, guidance_scale: float | None = None, seed: int | None = None,
        width: int | None = None, height: int | None = None, steps: int | None = None, num_images: int | None = None,
        negative_prompt: str | None = None, idempotency_key: str | None = None,
    ) -> Run:  # fmt: skip
        """Starts images from a prompt with the adapter `lora_id`. What is left out takes the service's default.

        `steps` and `num_images` belong to interface A, `negative_prompt` to B: `UnsupportedOption` on the other.
        """
        options = {
            "prompt": prompt, "lora_id": lora_id, "lora_weight": lora_weight, "guidance_scale": guidance_scale, "seed": seed, "width": width,
            "height": height, "steps": steps, "num_images": num_images, "negative_prompt": negative_prompt,
        }  # fmt: skip
        return Run(self, self.carry(self.service.generate(idempotency_key, options)))

    def upscale(self, image_id: str, scale_factor: int | None = None, *, idempotency_key: str | None = None) -> Run:
        """Starts a copy of an image, 2 or 4 times as large. An operation of interface A: the key must be valid there."""
        return Run(self, self.carry(self.service.upscale(idempotency_key, image_id, scale_factor)))

    def models(self) -> list[Model]:
        """The adapters this account may use. An operation of interface B: the key must be valid there."""
        return self.carry(self.service.models())

    def run(self, run_id: str) -> Run:
        """A run started earlier, here or elsewhere."""
        return Run(self, self.carry(self.service.record(run_id)))

    def carry(self, talk: Talk[T]) -> T:
        """Carries a conversation through to its result."""
        try:
            wish = next(talk)
            while True:
                if isinstance(wish, Pause):
                    time.sleep(wish.seconds)
                    wish = talk.send(None)
                    continue
                try:
                    response = self._http.request(wish.method, wish.url, headers=wish.headers, json=wish.json)
                except httpx.TransportError as error:
                    wish = talk.throw(error)
                else:
                    wish = talk.send(response)
        except StopIteration as end:
            return end.value

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
