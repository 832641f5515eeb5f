"""Jobs, images and models as the service returns them, parsed from either interface into one form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Model:
    """A LoRA adapter that this account may use; `id` is what `generate(lora_id=…)` takes."""

    id: str
    name: str
    description: str
    created_at: datetime

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Model":
        return cls(row["id"], row["name"], row["description"], datetime.fromisoformat(row["created_at"]))


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA that this account may use; `id` is what `generate(lora_id=…)` takes.

    `summary` says what its check found and `found` holds it in fields, such as `algorithm`, `rank`, `suggested_trigger_words`
    and, of an own one that was read alone, the training `metadata`. `sample_url` opens a picture drawn with it, None while
    there is none. `shared_with` (account id → name) is for own ones, too. `warning` says, of one that was just added, why its
    jobs would fail now. A service tells what it knows.
    """

    id: str
    name: str
    description: str
    trigger_words: tuple[str, ...]
    base_model: str
    created_at: datetime
    is_own: bool
    size_bytes: int | None = None
    summary: str = ""
    found: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shared_with: Mapping[str, str] = field(default_factory=dict[str, str])
    sample_url: str | None = None
    warning: str = ""

    @property
    def suggested_trigger_words(self) -> tuple[str, ...]:
        """What the file itself suggests; `trigger_words` are the owner's."""
        return tuple(self.found.get("suggested_trigger_words", ()))

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of its training."""
        return self.found.get("metadata", {})

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Lora":
        found = row.get("found", {})
        return cls(
            id=row["id"],
            name=row["name"],
            description=row["description"],
            trigger_words=tuple(row["trigger_words"]),
            base_model=row["base_model"],
            created_at=datetime.fromisoformat(row["created_at"]),
            is_own=row["is_own"],
            size_bytes=row.get("size_bytes"),
            summary=found.get("summary", ""),
            found=found,
            sample_url=row.get("sample_url"),
            shared_with={each["account_id"]: each["name"] for each in row.get("shared_with", ())},
            warning=row.get("warning", ""),
        )


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One finished image. Interface B returns only the URL."""

    url: str
    image_id: str | None = None
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """The state of a job in one answer."""

    id: str
    interface: Literal["a", "b"]
    status: str
    progress: int
    images: tuple[ImageRecord, ...] = ()
    error_code: str = ""
    error_message: str = ""
    estimated_completion_time: datetime | None = None
    completed_at: datetime | None = None
    unknown_words: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_final(self) -> bool:
        return self.status in ("completed", "failed")

    @classmethod
    def read(cls, body: Mapping[str, Any], interface: Literal["a", "b"], *, unknown_words: str = "") -> "Record":
        """`unknown_words` is the header of that name."""
        error = body.get("error") or {}
        return cls(
            id=body["request_id"] if interface == "a" else body["run_id"],
            interface=interface,
            status=body["status"],
            progress=100 if body["status"] == "completed" else body.get("progress", 0),
            images=_images(body),
            error_code=error.get("code", ""),
            error_message=error.get("message", ""),
            estimated_completion_time=_time(body.get("estimated_completion_time")),
            completed_at=_time(body.get("completed_at")),
            unknown_words=tuple(unquote(word) for word in unknown_words.split(", ") if word),
        )

    @classmethod
    def read_job(cls, row: Mapping[str, Any]) -> "Record":
        """Read a job of `/v1/jobs`, whose words for its state are finer than those of the interfaces."""
        status: str = row["status"]
        status = _STATUS_OF_JOB.get(status, status)
        error = row.get("error", {})
        return cls(
            id=row["id"],
            interface=row["interface"],
            status=status,
            progress=100 if status == "completed" else row["progress"],
            images=_images(row),
            error_code=error.get("code", ""),
            error_message=error.get("message", ""),
            estimated_completion_time=_time(row.get("estimated_completion_time")),
            completed_at=_time(row.get("finished_at")) if status == "completed" else None,
            request=row.get("request", {}),
        )


_STATUS_OF_JOB = {"running": "processing", "canceled": "failed", "expired": "failed"}


@dataclass(frozen=True, slots=True)
class Usage:
    """What the jobs that completed on one UTC day used with one key and one LoRA.

    `lora_id` is `upscale` for upscaled images, `key_id` empty for jobs of the console. `megapixel_steps` are width × height ×
    steps of the images in millions, `worker_seconds` the jobs' share of a GPU or CPU.
    """

    day: date
    key_id: str
    lora_id: str
    images: int
    megapixel_steps: float
    worker_seconds: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Usage":
        amounts = (row["images"], row["megapixel_steps"], row["worker_seconds"])
        return cls(date.fromisoformat(row["day"]), row["key_id"], row["lora_id"], *amounts)


def _images(body: Mapping[str, Any]) -> tuple[ImageRecord, ...]:
    if "image_url" in body:
        return (ImageRecord(body["image_url"]),)
    return tuple(
        ImageRecord(image["url"], image["image_id"], image["width"], image["height"])
        for image in body.get("images", ())
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
