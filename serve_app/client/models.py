"""The parts of a job and of an image that need no I/O, shared by the sync and the async client."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any

from serve_app.client.records import ImageRecord, Record

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

OnProgress = Callable[[int], object]
"""Called with the percentage, 0 to 100, whenever it has grown."""


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
        """`queued`, `processing`, `completed` or `failed`."""
        return self._record.status

    @property
    def progress(self) -> int:
        """Percent, 0 to 100."""
        return self._record.progress

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
    def request(self) -> Mapping[str, Any]:
        """What was asked for, such as `prompt` and `lora_id`.

        Empty until it came from `jobs` or `cancel` once: a poll does not tell.
        """
        return self._record.request

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


class ImageInfo:
    """A finished image.

    `image_id`, `width` and `height` are None on interface B, which does not return them.
    """

    def __init__(self, record: ImageRecord) -> None:
        self.image_id = record.image_id
        self.url = record.url
        self.width = record.width
        self.height = record.height

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.image_id or self.url}>"


def open_png(png: bytes) -> "PilImage":
    """Decode to a Pillow image; needs `pip install pillow`."""
    from PIL import Image

    image = Image.open(BytesIO(png), formats=["PNG"])
    image.load()
    return image
