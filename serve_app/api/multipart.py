"""Reads multipart forms, writing files to disk as they arrive: a block at a time is in memory."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.api.body import check_length, is_encoded, media_type, too_large
from serve_app.api.dependencies import jobs_of, loras_of
from serve_app.api.errors import shown_name
from serve_app.domain.errors import InvalidParameter, StoreUnavailable, UnsupportedMediaType

MEDIA_TYPE = "multipart/form-data"
FIELD_BYTES = 16 << 10
FRAME_BYTES = 64 << 10
"""Boundaries, the parts' headers and all text fields together have at most this many bytes."""
BLOCK_BYTES = 1 << 20
"""A thread writes the files when this many bytes have been collected."""


class Received(NamedTuple):
    """A form: its text fields, and its files by their fields, without the empty ones that browsers send for none."""

    texts: dict[str, str]
    files: Mapping[str, Path]


async def read_multipart(
    request: Request,
    place: AsyncExitStack,
    *,
    texts: Collection[str],
    files: Mapping[str, int],
    may_be_empty: bool = True,
) -> Received:
    """Receive a form with these text fields, and files of at most so many bytes each, there until `place` ends.

    Raises `StoreUnavailable` where there is no space, `PayloadTooLarge` (before a byte is read, where the declared
    length is too large), `UnsupportedMediaType`, `RequestTimeout`, `InvalidParameter`, in that order.
    """
    space = jobs_of(request).space
    await space.check()
    with disk_errors():
        folder = await place.enter_async_context(loras_of(request).uploads.folder())
        form = _Form(folder, texts, files)
        await _read(request, form, limit=sum(files.values()) + FRAME_BYTES, before_block=space.disk.check)
    if not form.is_whole:
        raise InvalidParameter("body: the multipart form is incomplete")
    if not may_be_empty and len(form.files) < len(form.sizes):
        empty = next(name for name in form.sizes if name not in form.files)
        raise InvalidParameter(f"{empty}: the file is empty")
    return Received(form.fields, form.files)


async def _read(request: Request, form: "_Form", *, limit: int, before_block: Callable[[], Awaitable[None]]) -> None:
    check_length(request, limit)
    parser = _parser(request, form)
    received = 0
    try:
        async for chunk in request.stream():
            received += len(chunk)
            if received > limit:
                raise too_large(limit)
            parser.write(chunk)
            if form.unwritten >= BLOCK_BYTES:
                await before_block()
                await asyncio.to_thread(form.write)
        await asyncio.to_thread(form.write)
    except FormParserError:
        raise InvalidParameter("body: is not a multipart form") from None


@contextmanager
def disk_errors() -> Generator[None]:
    """Raise `StoreUnavailable` for a disk that cannot keep an upload: nothing was accepted."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"an upload cannot be kept ({type(error).__name__})") from error


class _Form:
    """Receives the parser's events, and keeps what came of each file in `_blocks` until `write`."""

    def __init__(self, folder: Path, texts: Collection[str], files: Mapping[str, int]) -> None:
        self.fields: dict[str, str] = {}
        self.unwritten = 0
        self.is_whole = False
        self._folder, self._texts, self._limits = folder, texts, files
        self.sizes: dict[str, int] = {}
        self._blocks: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._name = ""
        self._text = bytearray()
        self._header, self._value, self._disposition = b"", b"", b""

    @property
    def files(self) -> Mapping[str, Path]:
        return {name: self._folder / name for name, size in self.sizes.items() if size}

    def on_part_begin(self) -> None:
        self._name, self._disposition = "", b""
        self._text.clear()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def on_headers_finished(self) -> None:
        name = parse_options_header(self._disposition)[1].get(b"name", b"").decode("utf-8", "replace")
        if name not in self._texts and name not in self._limits:
            fields = ", ".join((*self._texts, *self._limits))
            raise InvalidParameter(f"{shown_name(name)}: unknown field; the fields are {fields}")
        if name in self.fields or name in self.sizes:
            raise InvalidParameter(f"{name}: must be sent once")
        self._name = name
        if name in self._limits:
            self.sizes[name] = 0

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        block = data[start:end]
        if self._name in self._limits:
            self.sizes[self._name] += len(block)
            if self.sizes[self._name] > self._limits[self._name]:
                raise too_large(self._limits[self._name], self._name)
            self._blocks[self._name] += block
            self.unwritten += len(block)
            return
        self._text += block
        if len(self._text) > FIELD_BYTES:
            raise InvalidParameter(f"{self._name}: must be at most {FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        if self._name in self._texts:
            try:
                self.fields[self._name] = self._text.decode("utf-8")
            except UnicodeDecodeError:
                raise InvalidParameter(f"{self._name}: must be UTF-8 text") from None

    def on_end(self) -> None:
        self.is_whole = True

    def write(self) -> None:
        """Write what has been collected; in a thread.

        Each call opens its files again: a thread goes on when its upload is canceled, and the number of a descriptor
        that somebody else closed may by then be another client's.
        """
        blocks, self._blocks, self.unwritten = self._blocks, defaultdict(bytearray), 0
        for name, block in blocks.items():
            with (self._folder / name).open("ab") as file:
                file.write(block)


def _parser(request: Request, form: _Form) -> MultipartParser:
    boundary = parse_options_header(request.headers.get("content-type", ""))[1].get(b"boundary", b"")
    if media_type(request) != MEDIA_TYPE or not boundary or is_encoded(request):
        raise UnsupportedMediaType(
            f"Send the body as 'Content-Type: {MEDIA_TYPE}' with a boundary, without a content encoding."
        )
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": form.on_part_begin,
                "on_part_data": form.on_part_data,
                "on_part_end": form.on_part_end,
                "on_header_field": form.on_header_field,
                "on_header_value": form.on_header_value,
                "on_header_end": form.on_header_end,
                "on_headers_finished": form.on_headers_finished,
                "on_end": form.on_end,
            },
        )
    except FormParserError:
        raise InvalidParameter("Content-Type: its boundary is too long") from None
