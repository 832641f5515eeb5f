"""The synchronous client, for scripts and notebooks."""

import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import httpx

from serve_app.client.calls import RETRY_BUDGET_S, WAIT_S, AccountCalls, ImageCalls, JobCalls
from serve_app.client.display import data_uri
from serve_app.client.errors import sends_events
from serve_app.client.lora_calls import LoraCalls
from serve_app.client.pictures import PictureCalls, UploadedImage
from serve_app.client.protocol import Action, Interface, NextLine, Operation, Outcome, Sleep, advance
from serve_app.client.records import BaseModel, Event, Lora, Model, Record, Usage, open_picture
from serve_app.client.upload import TIMEOUT, Timeout, read_timeout, sent_body, timeout_of

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

T = TypeVar("T")


class Image(ImageCalls["Image"]):
    """A finished image, to save, to enlarge or to open with Pillow."""

    def download(self, path: str | Path | None = None) -> bytes:
        """The file's bytes, also written to `path` when one is given."""
        content = self._client.execute(self._content())
        if path is not None:
            Path(path).write_bytes(content)
        return content

    def save(self, path: str | Path | None = None) -> Path:
        """Write the file to `path`, or under the image's id into the working directory; returns the file."""
        file = self._file(path)
        self.download(file)
        return file

    def pil(self) -> "PilImage":
        """The picture as a Pillow image; needs `pip install pillow`."""
        return open_picture(self.download())

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
        return data_uri(image.download(), image.media_type)


class Client(AccountCalls[Job, list[Job], list[Model], list[BaseModel], list[Usage], None]):
    """Client of one service with one key, which is sent as interface "a" (bearer key) or "b" (X-API-Key) wants it.

    A call without an answer, or answered with 429, 5xx or a proxy's own 404, is retried, honoring `Retry-After`, while
    the delays add up to at most `retry_budget` seconds; of those, an address at which nothing has ever answered gets
    three. Every creating call sends an idempotency key, so a retry never creates a second job. `timeout` is how long an
    answer may take: seconds, a `timedelta`, or httpx's own. A `/v1` at the end of `base_url` is left out.
    """

    def __init__(
        self,
        base_url: str | None = None,
        key: str | None = None,
        *,
        interface: Interface = "a",
        retry_budget: float = RETRY_BUDGET_S,
        timeout: Timeout = TIMEOUT,
        ready_file: Path | str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(base_url, key, interface, retry_budget, timeout, ready_file)
        self._http = httpx.Client(timeout=read_timeout(timeout), transport=transport)
        self.loras = LoraCalls[Lora, list[Lora], None](self.service, self.execute)
        """List, add, change, share and delete LoRAs."""
        self.images = PictureCalls[UploadedImage, list[UploadedImage], None](self.service, self.execute)
        """Upload and delete pictures to draw from."""

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
        timeout = timeout_of(action.timeout, action.most, self._http.timeout)
        with sent_body(action.upload) as body:
            request = self._http.build_request(
                action.method, action.url, headers=action.headers, json=action.json, timeout=timeout, **body
            )
            response = self._http.send(request, stream=action.is_stream)
        if action.is_stream and not sends_events(response):
            response.read()
        return response

    def _job(self, record: Record, *, is_begun: bool = False) -> Job:
        return Job(self, record, is_begun=is_begun)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
