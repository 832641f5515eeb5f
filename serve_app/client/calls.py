"""What both clients can do: each method makes an operation, which `Client` performs and `AsyncClient` awaits.

The type variables are what the methods return: a job for `Client`, a coroutine that returns one for `AsyncClient`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, Unpack
from urllib.parse import urlencode

import httpx

from serve_app.client.access import find_access
from serve_app.client.display import Cell, grid_html, shown_bar
from serve_app.client.errors import JobFailed, WaitTimeout
from serve_app.client.events import Following
from serve_app.client.lora_calls import LoraCalls, rows_of
from serve_app.client.many import Drawing
from serve_app.client.options import Bodies, GenerationOptions, JobOptions, Loras, given_options, rows_of_lists
from serve_app.client.pictures import Picture, PictureCalls, picture_id
from serve_app.client.protocol import LONG_POLL_S, Interface, Operation, Service, Write, path_of, then, without_none
from serve_app.client.records import BaseModel, ImageInfo, JobState, OnProgress, Record, Usage, open_picture
from serve_app.client.upload import TIMEOUT, Timeout, read_timeout
from serve_app.client.webhook_calls import WebhookCalls

RETRY_BUDGET_S = 30.0
WAIT_S = 600.0
"""Images are waited for this long by default."""
CONCURRENCY = 32
"""`map` has at most this many jobs open: they fill several workers, and other requests wait only behind these."""
EMBEDDED_IMAGES = 16
"""A grid of more pictures links to them instead of holding them: a notebook of hundreds of megabytes opens nowhere."""

TransportT = TypeVar("TransportT")
JobT = TypeVar("JobT")
JobsT = TypeVar("JobsT")
BaseModelsT = TypeVar("BaseModelsT")
UsageT = TypeVar("UsageT")
T = TypeVar("T")
PictureT = TypeVar("PictureT", bound=ImageInfo)
ImageT = TypeVar("ImageT")
BytesT = TypeVar("BytesT")
PathT = TypeVar("PathT")
PilT = TypeVar("PilT")
NoneT = TypeVar("NoneT")


class AccountCalls(ABC, Generic[TransportT, JobT, JobsT, BaseModelsT, UsageT, NoneT]):
    """The calls of a client, except those on `loras`, `images` and `webhooks`."""

    _http_client: Callable[..., Any]
    """Makes httpx's client, whose connections this one uses."""
    loras: Any
    """List, add, change, share and delete LoRAs."""
    images: Any
    """Upload and delete pictures to draw from."""
    webhooks: Any
    """Be told when jobs end."""

    def __init__(
        self,
        base_url: str | None = None,
        key: str | None = None,
        *,
        interface: Interface = "a",
        retry_budget: float = RETRY_BUDGET_S,
        timeout: Timeout = TIMEOUT,
        ready_file: Path | str | None = None,
        transport: TransportT | None = None,
    ) -> None:
        limits = read_timeout(timeout)
        longest_wait = LONG_POLL_S if limits.read is None else min(LONG_POLL_S, limits.read / 2)
        base_url, key = find_access(base_url, key, interface, ready_file)
        self.service = Service(
            base_url=base_url, key=key, interface=interface, retry_budget=retry_budget, longest_wait=longest_wait
        )
        self._http = self._http_client(timeout=limits, transport=transport)
        self.loras = LoraCalls[Any, Any, Any](self.service, self.execute)
        self.images = PictureCalls[Any, Any, Any](self.service, self.execute)
        self.webhooks = WebhookCalls[Any, Any, Any, Any, Any](self.service, self.execute)
        self._bodies = Bodies(self.service)
        self.interrupted: list[Any] = []
        """The jobs of the call that broke off last: those that had ended have their images, the others were canceled."""

    @abstractmethod
    def execute(self, operation: Operation[Any]) -> Any:
        """Perform the calls and delays of an operation; returns its result."""

    @abstractmethod
    def _job(self, record: Record, *, is_begun: bool = False) -> Any:
        """Return the job of a record, which polls with this client; `is_begun` says that this client created it."""

    def canceling(self, waiting: Operation[T], begun: Callable[[], list[Any]]) -> Operation[T]:
        """Wait for the jobs that a call has begun; where Ctrl-C or an error breaks that off, cancel those still open.

        They go on where the time is over or a job has failed. The exception that leaves the call says where they are.
        """
        try:
            return (yield from waiting)
        except (GeneratorExit, WaitTimeout, JobFailed):
            raise
        except BaseException as stop:
            self.interrupted = [job for job in begun() if job.id]
            stop.add_note(f"Atelier cancels those still open of {len(self.interrupted)} jobs: see client.interrupted")
            for job in self.interrupted:
                if not (job.done or (yield from job.given_up())):
                    break
            raise

    def generate(
        self,
        prompt: str,
        *,
        loras: Loras | None = None,
        lora_id: str | None = None,
        image: Picture | None = None,
        mask: Picture | None = None,
        wait: bool | None = None,
        timeout: float | None = WAIT_S,
        progress: bool = True,
        idempotency_key: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> JobT:
        """Draw `prompt` with up to four LoRAs, one or none: `generate("a boat", loras={"neon": 0.8}).images[0]`.

        LoRAs are named by name or id. It returns when the images are ready, and shows a bar in a terminal or notebook
        unless `progress` is off. With `lora_id`, the id of one, it returns the started job at once. `wait` decides for
        either, `timeout` for how many seconds. `GenerationOptions` has the options; those left out are as the LoRAs, or
        else their base model, say. Ctrl-C or an error while it waits cancels the job, a time that is over does not.

        `image` is begun from, scaled to the size asked for, and `strength` says how much of it is redrawn; `mask` is
        white there, and black where it is kept. Either is uploaded unless the service has it:

            client.generate("a harbour at night", image="photo.jpg", strength=0.6, mask=mask_of_the_sky)
            client.generate("the same with snow", image=job.images[0])

        Raises `UnknownLora`, `InvalidRequest` for what the base model does not take, what `client.images.upload` raises,
        and when it waits what `job.wait()` raises.
        """

        def drawn() -> Operation[Any]:
            body = yield from self._bodies.generation(prompt, loras, options, lora_id)
            body |= yield from self._bodies.pictures(body, image, mask)
            job = self._job((yield from self._bodies.create(body, idempotency_key)), is_begun=True)
            if lora_id is None if wait is None else wait:
                yield from self.ended(job, f"Drawing {prompt}", progress, timeout)
            return job

        return self.execute(drawn())

    def map(
        self,
        prompts: str | Sequence[str],
        *,
        loras: Loras | Sequence[Loras] | None = None,
        seeds: Sequence[int] | None = None,
        image: Picture | None = None,
        mask: Picture | None = None,
        concurrency: int = CONCURRENCY,
        progress: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> JobsT:
        """Draw many: the n-th job has the n-th prompt, LoRA and seed of the lists; what is no list counts for all.

        `image` and `mask`, as `generate` takes them, count for all too, and are uploaded once.

        Returns the ended jobs in this order; a failed one has its reason in `error`, and no images. A request that the
        service refuses, as for an empty prompt, stands in its place as a failed job without an id. At most
        `concurrency` jobs are open at once, or as many as the service takes, and the plan's next window is waited for,
        however long that is.

        Raises before any job is started: `ValueError` for lists of different lengths, what `generate` does for wrong
        options and names of LoRAs, and `Unauthorized`, `Unreachable` and the like. Once a job is started such an error
        ends the starting, not the call: the other jobs have it as their `error`, and one that can no longer be asked
        about is returned with its id, not `done`. Ctrl-C, or a task's cancellation, cancels the jobs that are open;
        `client.interrupted` has all that were started.
        """
        requests = [
            (prompt, each, options if seed is None else {**options, "seed": seed})
            for prompt, each, seed in rows_of_lists(prompts=prompts, loras=loras, seeds=seeds)
        ]

        def drawn() -> Operation[Any]:
            bodies: list[dict[str, Any]] = []
            for words, uses, asked in requests:
                bodies.append((yield from self._bodies.generation(words, uses, asked)))
            pictures = yield from self._bodies.pictures(options, image, mask)
            bodies = [body | pictures for body in bodies]
            with shown_bar(f"Drawing {len(requests)} jobs", wanted=progress) as show:
                drawing = Drawing(
                    service=self.service,
                    create=self._bodies.create,
                    requests=bodies,
                    concurrency=concurrency,
                    show=show,
                )

                def begun() -> JobList[Any]:
                    return JobList(self._job(record, is_begun=True) for record in drawing.records)

                yield from self.canceling(drawing.draw(), begun)
            return begun()

        return self.execute(drawn())

    def upscale(
        self,
        image: Picture,
        scale_factor: int | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> JobT:
        """Start a job that enlarges a picture 2 or 4 times, which is uploaded unless the service has it."""
        return self.execute(self.enlarging(image, scale_factor, options, idempotency_key))

    def enlarging(
        self, image: Picture, scale_factor: int | None, options: Mapping[str, Any], idempotency_key: str | None = None
    ) -> Operation[Any]:
        """Start a job as `upscale` does, as a part of another operation."""
        fields = given_options("upscale", JobOptions, options) | without_none({"scale_factor": scale_factor})
        image_id = yield from picture_id(self.service, image)
        body = {"kind": "upscale", "image_id": image_id, **fields}
        return self._job((yield from self.service.create(idempotency_key, body)), is_begun=True)

    def ended(self, job: Any, label: str, progress: bool, timeout: float | None) -> Operation[Any]:
        """Wait for the images of a job that this call has begun, with a bar where somebody sees it."""
        with shown_bar(label, wanted=progress) as show:
            return (yield from job.ending(timeout, show and (lambda percent: show(label, percent / 100))))

    def base_models(self) -> BaseModelsT:
        """The base models on offer, the default first, with what may be asked of each."""
        asked = self.service.ask("GET", "/v1/base-models")
        return self.execute(then(asked, lambda body: [BaseModel.read(row) for row in body["base_models"]]))

    def run(self, run_id: str) -> JobT:
        """Return a job that was started earlier, by its id."""
        return self.execute(then(self.service.record(run_id), self._job))

    def jobs(self, limit: int = 20) -> JobsT:
        """The account's newest jobs, newest first; `job.request` says what was asked for."""
        listed = rows_of(self.service, "/v1/jobs", "jobs", Record.read, limit=limit)
        return self.execute(then(listed, lambda records: [*map(self._job, records)]))

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


class JobCalls(JobState, ABC, Generic[PictureT, JobT, NoneT]):
    """Follows a generation or an upscale to its images, with the calls on it."""

    _image: Callable[[Any, Record, int], PictureT]

    def __init__(
        self, client: AccountCalls[Any, JobT, Any, Any, Any, NoneT], record: Record, *, is_begun: bool = False
    ) -> None:
        super().__init__(record)
        self._client, self._is_begun = client, is_begun

    @property
    def images(self) -> list[PictureT]:
        """The finished images; empty until the job is completed."""
        return [self._image(self._client, self._record, index) for index in range(len(self._record.images))]

    def refresh(self) -> JobT:
        """Poll the job once."""
        return self._follow(self._client.service.record(self.id))

    def cells(self, *, embedded: bool) -> list[Cell]:
        """What a notebook's grid shows of the job, with the pictures themselves or their addresses."""
        title = str(self.request.get("prompt", self.id))
        return [Cell(self._embedded(image) if embedded else image.url, image.caption, title) for image in self.images]

    @abstractmethod
    def _embedded(self, image: PictureT) -> str:
        """Return an address that holds the picture itself, where that needs no waiting."""

    def _repr_html_(self) -> str | None:
        return grid_html(self.cells(embedded=True)) if self.images else None

    def _following(self, lines_of: Callable[[httpx.Response], Any]) -> Following:
        return Following(self._client.service, self, self._update, lines_of)

    def wait(self, timeout: float | None = WAIT_S, on_progress: OnProgress | None = None) -> JobT:
        """Return when the images are ready. Raises `JobFailed`, or `WaitTimeout` after `timeout` seconds.

        Ctrl-C or another error cancels a job that this client has begun, and leaves one that it looked up.
        """
        return self._client.execute(self.ending(timeout, on_progress))

    def ending(self, timeout: float | None, on_progress: OnProgress | None) -> Operation[Self]:
        """Wait as `wait` does, as a part of another operation."""
        on_record, shows_progress = self._recorder(on_progress), on_progress is not None
        waiting = self._client.service.wait(self._record, timeout, on_record, shows_progress=shows_progress)
        record = yield from (self._client.canceling(waiting, lambda: [self]) if self._is_begun else waiting)
        self._update(record)
        return self

    def given_up(self) -> Operation[bool]:
        """Cancel the job on the way out of a call; False where the service does not answer."""
        record = yield from self._client.service.give_up(self._record)
        self._update(record or self._record)
        return record is not None

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


class JobList(list[JobT]):
    """The jobs of `map`, in the order of its prompts; a notebook shows their pictures."""

    def _repr_html_(self) -> str:
        jobs: list[Any] = [*self]
        embedded = sum(len(job.images) for job in jobs) <= EMBEDDED_IMAGES
        return grid_html(cell for job in jobs for cell in job.cells(embedded=embedded))


class ImageCalls(ImageInfo, Generic[ImageT, BytesT, PathT, PilT]):
    """A finished image, to save, to enlarge or to open with Pillow."""

    def __init__(self, client: AccountCalls[Any, Any, Any, Any, Any, Any], record: Record, index: int) -> None:
        super().__init__(**vars(record.images[index]))
        self._client, self._record, self._index = client, record, index

    def upscale(
        self,
        scale_factor: int | None = None,
        *,
        timeout: float | None = WAIT_S,
        progress: bool = True,
        **options: Unpack[JobOptions],
    ) -> ImageT:
        """Enlarge the image 2 or 4 times; returns the larger image. Waits as `generate` does."""

        def enlarged() -> Operation[Any]:
            job = yield from self._client.enlarging(self, scale_factor, options)
            return (yield from self._client.ended(job, f"Enlarging {scale_factor or 2}×", progress, timeout)).images[0]

        return self._client.execute(enlarged())

    def download(self, path: str | Path | None = None) -> BytesT:
        """The file's bytes, also written to `path` when one is given, as `save` does."""
        return self._client.execute(self._downloaded(path))

    def save(self, path: str | Path | None = None) -> PathT:
        """Write the file to `path`, or under the image's id into the working directory; returns the file.

        Raises `ValueError` where the name says another format: images have the one that `output_format` asked for.
        """
        file = Path(path or f"{self.image_id}{self.suffix}")
        return self._client.execute(then(self._downloaded(file), lambda _: file))

    def pil(self) -> PilT:
        """The picture as a Pillow image; needs `pip install pillow`."""
        return self._client.execute(then(self._downloaded(), open_picture))

    def _downloaded(self, path: str | Path | None = None) -> Operation[bytes]:
        if path is not None:
            self.check_name(Path(path))
        content = yield from self._client.service.download(self._record, self._index)
        if path is not None:
            yield Write(Path(path), content)
        return content
