"""What both clients can do: each method makes an operation, which `Client` performs and `AsyncClient` awaits.

The type variables are what the methods return: a job for `Client`, a coroutine that returns one for `AsyncClient`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Any, Generic, Self, TypeVar, Unpack
from urllib.parse import urlencode

from serve_app.client.errors import ServiceError
from serve_app.client.protocol import (
    LONG_POLL_S,
    GenerationOptions,
    Interface,
    Operation,
    Service,
    checked_key,
    path_of,
    then,
    without_none,
)
from serve_app.client.records import ImageInfo, JobState, Lora, Model, OnProgress, Record, Usage
from serve_app.client.upload import (
    CHECK_S,
    OnSent,
    Timeout,
    Upload,
    lora_files,
    read_timeout,
    upload_progress,
    weights_sha256,
)

RETRY_BUDGET_S = 30.0
PAGE = 200
"""One call asks for at most this many rows of a listing."""
ASK_FROM_BYTES = 8 << 20
"""Smaller files are sent at once: asking first is a request of its own, and counts as one."""
_SEND_THE_FILE = (404, 405, 415)
"""The file is sent after these answers to whether its weights are known: no, or the service does not know the
question."""

JobT = TypeVar("JobT")
JobsT = TypeVar("JobsT")
ModelsT = TypeVar("ModelsT")
UsageT = TypeVar("UsageT")
LoraT = TypeVar("LoraT")
LorasT = TypeVar("LorasT")
ImageT = TypeVar("ImageT")
NoneT = TypeVar("NoneT")


class AccountCalls(ABC, Generic[JobT, JobsT, ModelsT, UsageT, NoneT]):
    """The calls of a client, except those on `loras`."""

    def __init__(self, base_url: str, key: str, interface: Interface, retry_budget: float, timeout: Timeout) -> None:
        read = read_timeout(timeout).read
        longest_wait = LONG_POLL_S if read is None else min(LONG_POLL_S, read / 2)
        self.service = Service(
            base_url=base_url, key=key, interface=interface, retry_budget=retry_budget, longest_wait=longest_wait
        )

    @abstractmethod
    def execute(self, operation: Operation[Any]) -> Any:
        """Perform the calls and delays of an operation; returns its result."""

    @abstractmethod
    def _job(self, record: Record) -> Any:
        """Return the job of a record, which polls with this client."""

    def generate(
        self, prompt: str, *, lora_id: str, idempotency_key: str | None = None, **options: Unpack[GenerationOptions]
    ) -> JobT:
        """Start a job that draws `prompt` with the LoRA adapter `lora_id`.

        Options left out take the service's defaults; `GenerationOptions` has their names. `UnsupportedOption` is raised
        for one that the interface does not have.
        """
        fields = {"prompt": prompt, "lora_id": lora_id, **options}
        return self.execute(then(self.service.generate(idempotency_key, fields), self._job))

    def upscale(self, image_id: str, scale_factor: int | None = None, *, idempotency_key: str | None = None) -> JobT:
        """Start a job that enlarges an image 2 or 4 times. Part of interface A: the key must be valid there."""
        return self.execute(then(self.service.upscale(idempotency_key, image_id, scale_factor), self._job))

    def models(self) -> ModelsT:
        """The adapters this account may use. Part of interface B: the key must be valid there."""
        asked = self.service.ask("GET", "/v1/models", interface="b")
        return self.execute(then(asked, lambda body: [Model.read(row) for row in body["models"]]))

    def run(self, run_id: str) -> JobT:
        """Return a job that was started earlier, by its id."""
        return self.execute(then(self.service.record(run_id), self._job))

    def jobs(self, limit: int = 20) -> JobsT:
        """The account's newest jobs of both interfaces, newest first.

        `job.request` says what was asked for.
        """
        listed = _rows(self.service, "/v1/jobs", "jobs", {}, limit)
        return self.execute(then(listed, lambda rows: [self._job(Record.read(row)) for row in rows]))

    def cancel(self, run_id: str) -> JobT:
        """Cancel a job by its id, as `job.cancel()` does. Raises `NotFound`."""
        return self.execute(then(self.service.cancel(run_id), self._job))

    def usage(self, days: int = 30) -> UsageT:
        """What completed jobs used in the last days (UTC, at most 366), by day, key and LoRA.

        The oldest is first.
        """
        asked = self.service.ask("GET", f"/v1/usage?{urlencode({'days': days})}")
        return self.execute(then(asked, lambda body: [Usage.read(row) for row in body["usage"]]))

    def delete_image(self, run_id: str, image_id: str) -> NoneT:
        """Delete one image of a job; with its last image goes the job. Raises `NotFound`."""
        return self.execute(self.service.delete(path_of("/v1/jobs", run_id, "images", image_id)))

    def delete(self, run_id: str) -> NoneT:
        """Delete a job that has ended, with its prompt and its images.

        Raises `NotFound`, and `Conflict` while it has not ended.
        """
        return self.execute(self.service.delete(path_of("/v1/jobs", run_id)))


class JobCalls(JobState, Generic[ImageT, JobT, NoneT]):
    """Follows a generation or an upscale to its images, with the calls on it."""

    _image: Callable[[Any, Record, int], ImageT]

    def __init__(self, client: AccountCalls[JobT, Any, Any, Any, NoneT], record: Record) -> None:
        super().__init__(record)
        self._client = client

    @property
    def images(self) -> list[ImageT]:
        """The finished images; empty until the job is completed."""
        return [self._image(self._client, self._record, index) for index in range(len(self._record.images))]

    def refresh(self) -> JobT:
        """Poll the job once."""
        return self._follow(self._client.service.record(self.id, self._record.interface))

    def wait(self, timeout: float | None = 600.0, on_progress: OnProgress | None = None) -> JobT:
        """Return when the images are ready. Raises `JobFailed`, or `WaitTimeout` after `timeout` seconds."""
        on_record, shows_progress = self._recorder(on_progress), on_progress is not None
        return self._follow(self._client.service.wait(self._record, timeout, on_record, shows_progress=shows_progress))

    def cancel(self) -> JobT:
        """Cancel the job: at once while it waits, at its next step while it runs.

        One that has ended stays as it is.
        """
        return self._follow(self._client.service.cancel(self.id))

    def delete(self) -> NoneT:
        """Delete the job, which must have ended, with its prompt and its images."""
        return self._client.delete(self.id)

    def _follow(self, operation: Operation[Record]) -> JobT:
        def update(record: Record) -> Self:
            self._update(record)
            return self

        return self._client.execute(then(operation, update))


class ImageCalls(ImageInfo):
    """A finished image, to download or to open with Pillow."""

    def __init__(self, client: AccountCalls[Any, Any, Any, Any, Any], record: Record, index: int) -> None:
        super().__init__(record.images[index])
        self._client, self._record, self._index = client, record, index

    def _png(self) -> Operation[bytes]:
        return self._client.service.download(self._record, self._index)


class LoraCalls(Generic[LoraT, LorasT, NoneT]):
    """The LoRAs that this account may use, and its own, with either interface's key."""

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Any]) -> None:
        self._service, self._execute = service, execute

    def list(self, *, base_model: str | None = None, q: str | None = None) -> LorasT:
        """List the LoRAs, newest first; of one base model, or with `q` in name, description or trigger words."""
        listed = _rows(self._service, "/v1/loras", "loras", without_none({"base_model": base_model, "q": q}))
        return self._execute(then(listed, lambda rows: [Lora.read(row) for row in rows]))

    def get(self, lora_id: str) -> LoraT:
        """Return a LoRA that this account owns or may use. Raises `NotFound`."""
        return self._ask("GET", lora_id)

    def add(
        self,
        path: str | Path | None = None,
        *,
        source: str | None = None,
        base: str | None = None,
        base_model: str | None = None,
        name: str | None = None,
        description: str = "",
        trigger_words: Sequence[str] = (),
        progress: bool = False,
        on_progress: OnSent | None = None,
        idempotency_key: str | None = None,
    ) -> LoraT:
        """Upload a safetensors file, or a folder as PEFT saves one, for the base model `base`.

        It can be used at once. With `source` in place of a path the service fetches it, from where its operator
        allows: `s3://…`, `hf://…`. `progress` shows a bar of the upload; `on_progress` is called with the bytes sent
        and the bytes in all. Weights that the account has already give the LoRA that has them, and are not sent again
        from 8 MiB on. `base_model` is another name of `base`. Raises `InvalidRequest` with the reason for a file that
        does not fit, `Conflict` over the plan's quota, `ValueError` for arguments that exclude each other.
        """
        if (path is None) == (source is None):
            raise ValueError("path: give either a path or a source")
        if (base is None) == (base_model is None):
            raise ValueError("base: name the base model once, as base or as base_model")
        fields: dict[str, Any] = {
            "name": name or PurePath(path or source or "").stem,
            "base_model": base or base_model,
            **({"description": description} if description else {}),
            **({"trigger_words": [*trigger_words]} if trigger_words else {}),
        }
        headers = {"Idempotency-Key": checked_key(idempotency_key)}
        showing = upload_progress(fields["name"], on_progress, shows_bar=progress)
        adding = _add(self._service, path, fields if source is None else {**fields, "source": source}, headers, showing)
        return self._execute(then(adding, Lora.read))

    def update(
        self,
        lora_id: str,
        *,
        name: str | None = None,
        description: str | None = None,
        trigger_words: Sequence[str] | None = None,
    ) -> LoraT:
        """Change what is given of an own one. Raises `NotFound`."""
        words = None if trigger_words is None else [*trigger_words]
        given = {"name": name, "description": description, "trigger_words": words}
        return self._ask("PATCH", lora_id, body=without_none(given))

    def delete(self, lora_id: str) -> NoneT:
        """Delete an own one: jobs that wait for it or run with it end as failed. Raises `NotFound`."""
        return self._execute(self._service.delete(path_of("/v1/loras", lora_id)))

    def share(self, lora_id: str, account: str) -> LoraT:
        """Let another account, by its id or name, use an own one. Raises `NotFound`."""
        return self._ask("POST", lora_id, "grants", body={"account": account})

    def unshare(self, lora_id: str, account: str) -> NoneT:
        """End what `share` began. Raises `NotFound`."""
        return self._execute(self._service.delete(path_of("/v1/loras", lora_id, "grants", account)))

    def _ask(self, method: str, *place: str, body: dict[str, Any] | None = None) -> LoraT:
        return self._execute(then(self._service.ask(method, path_of("/v1/loras", *place), body), Lora.read))


def _rows(
    service: Service, path: str, name: str, asked: dict[str, Any], limit: int | None = None
) -> Operation[list[Any]]:
    """The rows of a listing, at most `limit`, over as many pages as it takes."""
    found: list[Any] = []
    cursor: dict[str, str] = {}
    while limit is None or len(found) < limit:
        size = PAGE if limit is None else min(PAGE, limit - len(found))
        page = yield from service.ask("GET", f"{path}?{urlencode({**asked, 'limit': size, **cursor})}")
        found += page[name]
        if "next_cursor" not in page:
            break
        cursor = {"cursor": page["next_cursor"]}
    return found


def _add(
    service: Service,
    path: str | Path | None,
    fields: dict[str, Any],
    headers: dict[str, str],
    showing: AbstractContextManager[OnSent | None],
) -> Operation[Any]:
    """Add a LoRA by a POST that is safe to retry: the idempotency key returns the first one's LoRA.

    Large files are sent only if the account has no LoRA of these weights.
    """
    with showing as on_sent:
        if path is None:
            return (yield from service.ask("POST", "/v1/loras", fields, headers, timeout=CHECK_S))
        files = lora_files(Path(path))
        if sum(file.stat().st_size for file in files.values()) >= ASK_FROM_BYTES:
            try:
                asked = {**fields, "sha256": weights_sha256(files)}
                return (yield from service.ask("POST", "/v1/loras", asked, headers, timeout=CHECK_S))
            except ServiceError as error:
                if error.status not in _SEND_THE_FILE:
                    raise
        form = {name: ", ".join(text) if name == "trigger_words" else text for name, text in fields.items()}
        upload = Upload(form, files, on_sent)
        return (yield from service.ask("POST", "/v1/loras", None, headers, upload=upload, timeout=CHECK_S))
