"""Jobs, images, LoRAs and base models as the service returns them."""

import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from datetime import date, datetime
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

PilPicture: TypeAlias = "PilImage"
"""Pillow's class, whose module is loaded only when a picture is opened."""

FORMATS = ("png", "jpeg", "webp")
"""What `output_format` may be."""

_FROM_JSON: dict[object, Callable[[Any], Any]] = {
    date: date.fromisoformat,
    datetime: datetime.fromisoformat,
    datetime | None: datetime.fromisoformat,
    int | None: int,  # seeds are sent as text, since JavaScript rounds long numbers
    tuple[str, ...]: tuple,
}
"""How fields of these types are converted; others stay as JSON has them."""


class Row:
    """An object of an answer: each field of a subclass, a dataclass, is read from the key of its name."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """Read what a row has of the fields; those that it lacks, as an older service's may, take their defaults."""
        given = {each.name: (each.type, row[each.name]) for each in fields(cls) if row.get(each.name) is not None}
        return cls(**{name: _FROM_JSON.get(kind, lambda same: same)(value) for name, (kind, value) in given.items()})


@dataclass(frozen=True)
class BaseModel(Row):
    """A base model on offer; `id` is what `generate(base_model=…)` takes.

    `usual_side` (pixels), `steps`, `guidance_scale`, `guidance_start`, `guidance_end` and `sampler`, which is empty for
    its own, are those of a job that names none. `longest_side` is the most that it draws, and `samplers` are what it
    takes, each also with a spacing as in `dpm++2m-karras`. `prompt_weights` and `mask` say whether it takes these.
    """

    id: str
    usual_side: int
    longest_side: int
    steps: int
    guidance_scale: float
    sampler: str
    samplers: list[str]
    prompt_weights: bool
    mask: bool
    guidance_start: float = 0.0
    guidance_end: float = 1.0


@dataclass(frozen=True)
class Lora(Row):
    """A LoRA that this account may use; `id` is what `generate(lora_id=…)` takes.

    `found` holds what the check of its file found, such as `algorithm`, `rank`, `suggested_trigger_words` and, for one
    of your own that was read alone, the training `metadata`. `sample_url` opens a picture drawn with it; it is None
    while there is none. `shared_with` (account id → name) is filled for your own only. `warning` says why jobs with a
    LoRA that was just added would fail now. `base_models` are what `generate(base_model=…)` takes with it, its own
    first. `recommended_steps` and `recommended_guidance` are what it or its base model was made for; they are None where
    nothing is known.
    """

    id: str
    name: str
    description: str
    trigger_words: tuple[str, ...]
    base_model: str
    created_at: datetime
    is_own: bool
    size_bytes: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shared_with: Mapping[str, str] = field(default_factory=dict[str, str])
    sample_url: str | None = None
    warning: str = ""
    recommended_steps: int | None = None
    recommended_guidance: float | None = None
    base_models: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What the check of its file found, in a line."""
        return self.found.get("summary", "")

    @property
    def suggested_trigger_words(self) -> tuple[str, ...]:
        """What the file itself suggests; `trigger_words` are the owner's."""
        return tuple(self.found.get("suggested_trigger_words", ()))

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of its training."""
        return self.found.get("metadata", {})

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        shared_with = {each["account_id"]: each["name"] for each in row.get("shared_with", ())}
        return super().read({**row, "shared_with": shared_with})


@dataclass(eq=False, repr=False)
class ImageInfo(Row):
    """A finished image. Its `seed` draws it again alone; an enlarged one has None."""

    image_id: str
    url: str
    width: int
    height: int
    seed: int | None = None

    @property
    def suffix(self) -> str:
        """How the name of its file ends: `.png`, `.jpg` or `.webp`."""
        return PurePosixPath(urlsplit(self.url).path).suffix

    @property
    def media_type(self) -> str:
        return f"image/{self.suffix[1:].replace('jpg', 'jpeg')}"

    def check_name(self, file: Path) -> None:
        """Raise `ValueError` for a file whose name says another format of images than its content would have."""
        wanted = format_of(file)
        if wanted and f"image/{wanted}" != self.media_type:
            asking = f", or draw with output_format={wanted!r}" if wanted in FORMATS else ""
            raise ValueError(
                f"{file}: the image is {self.media_type[6:].upper()}: save it as {file.with_suffix(self.suffix).name}"
                f"{asking}; Pillow converts it without its marks and settings: image.pil().save({file.name!r})"
            )

    @property
    def caption(self) -> str:
        """What a notebook writes below the picture."""
        return f"{self.width} × {self.height}" if self.seed is None else f"seed {self.seed}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.image_id} {self.caption}>"


ENDS = ("completed", "failed", "canceled", "expired")
"""The states of `/v1/jobs` that a job stays in; before, it is `queued` and `running`."""


@dataclass(frozen=True)
class Record(Row):
    """Holds the state of a job as one answer of the service gives it."""

    id: str
    status: str
    progress: int = 0
    images: tuple[ImageInfo, ...] = ()
    error_code: str = ""
    error_message: str = ""
    estimated_completion_time: datetime | None = None
    completed_at: datetime | None = None
    unknown_words: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    marking: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    unread_characters: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def is_final(self) -> bool:
        return self.status in ENDS

    @classmethod
    def read(cls, row: Mapping[str, Any], *, unknown_words: str = "") -> Self:
        """Read a job of `/v1/jobs`; `unknown_words` is what the answer's `X-Unknown-Words` header says."""
        error = row.get("error") or {}
        told: dict[str, Any] = {
            "images": tuple(ImageInfo.read(image) for image in row.get("images", ())),
            "error_code": error.get("code"),
            "error_message": error.get("message"),
            "unknown_words": [unquote(word) for word in unknown_words.split(", ") if word],
        }
        if row["status"] == "completed":
            told |= {"progress": 100, "completed_at": row.get("finished_at")}
        return super().read({**row, **told})


@dataclass(frozen=True)
class Usage(Row):
    """What the jobs that completed on one UTC day used with one key and one LoRA.

    `lora_id` is `upscale` for upscaled images, and `key_id` is empty for jobs of the console. `megapixel_steps` are
    width × height × steps of the images in millions, without steps for upscaled ones, and `worker_seconds` the jobs'
    share of a GPU or CPU.
    """

    day: date
    key_id: str
    lora_id: str
    images: int
    megapixel_steps: float
    worker_seconds: float


OnProgress = Callable[[int], object]
"""A callback that is given the percentage, 0 to 100, whenever it has grown."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A small PNG of the unfinished image `index`, as it was after `step` steps."""

    index: int
    step: int
    png: bytes = field(repr=False)

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a job: its status, its progress in percent, and when it will probably end.

    `preview` is set where an unfinished image has come on, and nothing else has changed.
    """

    status: str
    progress: int
    estimated_completion_time: datetime | None
    preview: Preview | None = None


class JobState:
    """The state of a job at the last poll; `refresh` and `wait` poll again."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.unknown_words = record.unknown_words
        """Words of the prompt that the base model has never read, set when the job is created."""

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def status(self) -> str:
        """`queued`, `running`, `completed`, `failed`, `canceled` or `expired`."""
        return self._record.status

    @property
    def progress(self) -> int:
        """Percent, 0 to 100."""
        return self._record.progress

    @property
    def event(self) -> Event:
        """The state as `events` yields it."""
        return Event(self.status, self.progress, self.estimated_completion_time)

    @property
    def error(self) -> str:
        """Why the job ended without images, in words; empty for every other."""
        return self._record.error_message

    @property
    def error_code(self) -> str:
        """Why the job ended without images, as the API names it, such as `out_of_memory`; empty for every other."""
        return self._record.error_code

    @property
    def done(self) -> bool:
        """Whether the job has ended, with images or without."""
        return self._record.is_final

    @property
    def estimated_completion_time(self) -> datetime | None:
        return self._record.estimated_completion_time

    @property
    def completed_at(self) -> datetime | None:
        return self._record.completed_at

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of a completed job by stage: `queue`, `load` its LoRAs, `denoise`, `store`; empty where unknown."""
        return self._record.timings

    @property
    def unread_characters(self) -> Mapping[str, int]:
        """What a completed job's base model did not read of `prompt` and `negative_prompt`; empty where it read all."""
        return self._record.unread_characters

    @property
    def request(self) -> Mapping[str, Any]:
        """What was asked for, such as `prompt`, `loras` and `steps`, defaults filled in."""
        return self._record.request

    @property
    def marking(self) -> Mapping[str, Any]:
        """How a completed job's images are marked, by `source_type` and `marks`; empty where they are not."""
        return self._record.marking

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.status} {self.progress} %>"

    def _update(self, record: Record) -> None:
        """Take a newer record; what it does not tell stays."""
        known = self._record
        progress = max(known.progress, record.progress)
        self._record = replace(record, progress=progress, request=record.request or known.request)

    def _recorder(self, on_progress: OnProgress | None) -> Callable[[Record], None]:
        """A callback that stores the newest record and calls `on_progress` when the percentage has grown."""

        def store(record: Record) -> None:
            has_grown = record.progress > self._record.progress
            self._update(record)
            if has_grown and on_progress is not None:
                on_progress(record.progress)

        return store


def format_of(file: Path) -> str:
    """The format of images that the file's name says, such as `jpeg`; empty for any other name."""
    kind, _ = mimetypes.guess_type(file.name, strict=False)
    return kind.removeprefix("image/") if kind is not None and kind.startswith("image/") else ""


def open_picture(picture: bytes) -> PilPicture:
    """Decode to a Pillow image; needs `pip install pillow`, which `ModuleNotFoundError` says without it."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pil() needs Pillow: pip install pillow", name=error.name) from None

    image = Image.open(BytesIO(picture), formats=["PNG", "JPEG", "WEBP"])
    image.load()
    return image
