"""Pictures to draw from: `client.images`, which uploads them, and what `image=` and `mask=` take.

The type variables are what the methods return: an uploaded image for `Client`, a coroutine that returns one for
`AsyncClient`.
"""

import base64
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO, TextIOBase
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, Union
from urllib.parse import unquote_to_bytes

import httpx

from serve_app.client.errors import is_expected
from serve_app.client.lora_calls import rows_of
from serve_app.client.protocol import Call, Operation, Service, checked_key, path_of, then
from serve_app.client.records import ImageInfo, PilPicture, Row
from serve_app.client.upload import CHECK_S, Upload

MAX_FILE_BYTES = 20 * 1000 * 1000
"""The service takes no larger file, and would close the connection while this is still sending."""
_ID = re.compile(r"img_[a-z2-7]{26}")

UploadedT = TypeVar("UploadedT")
UploadedListT = TypeVar("UploadedListT")
NoneT = TypeVar("NoneT")


@dataclass(frozen=True)
class UploadedImage(Row):
    """A picture as the service keeps it until `expires_at`.

    One that the account has uploaded is an upright PNG; one that a job made has its `job_id`.
    """

    id: str
    url: str
    width: int
    height: int
    size_bytes: int
    sha256: str
    created_at: datetime
    expires_at: datetime
    job_id: str | None = None


PictureFile = Union[str, Path, bytes, IO[bytes], "PilPicture"]
"""A PNG, JPEG or WebP: its path, its http or data address, its bytes or an open file of them; or a Pillow image."""
Picture = PictureFile | ImageInfo | UploadedImage
"""A file, or an image that the service has: one of a job, an uploaded one, or the id of either, `img_…`."""


class PictureCalls(Generic[UploadedT, UploadedListT, NoneT]):
    """The pictures that this account uploads, with either interface's key."""

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Any]) -> None:
        self._service, self._execute = service, execute

    def upload(self, picture: PictureFile, *, idempotency_key: str | None = None) -> UploadedT:
        """Upload a picture of at most 20 MB, to be drawn from again and again.

            photo = client.images.upload("photo.jpg")
            client.generate("a harbour, neon", loras="neon", image=photo, strength=0.6)

        An address is fetched from here, without the key. A picture that the account has already is the same image,
        which stays for another retention time. Raises `OSError` for a file or address that gives none, `ValueError` for
        a larger file, `InvalidRequest` for what is no such picture, and `Conflict` where the account's images take all
        the space that they may.
        """
        return self._execute(then(_upload(self._service, picture, idempotency_key), UploadedImage.read))

    def list(self) -> UploadedListT:
        """List the pictures that count against the account, newest first."""
        return self._execute(rows_of(self._service, "/v1/images", "images", UploadedImage.read))

    def get(self, image_id: str) -> UploadedT:
        """Return an image that was uploaded, or that a job made, with a fresh address. Raises `NotFound`."""
        return self._execute(then(self._service.ask("GET", path_of("/v1/images", image_id)), UploadedImage.read))

    def delete(self, image_id: str) -> NoneT:
        """Delete an uploaded image. Raises `NotFound`, and `Conflict` while a job that has not ended needs it."""
        return self._execute(self._service.delete(path_of("/v1/images", image_id)))


def picture_id(service: Service, picture: Picture) -> Operation[str]:
    """Return the id of a picture, which is uploaded unless the service has it."""
    if isinstance(picture, ImageInfo):
        return picture.image_id
    if isinstance(picture, UploadedImage):
        return picture.id
    if isinstance(picture, str) and _ID.fullmatch(picture):
        return picture
    return (yield from _upload(service, picture))["id"]


def _upload(service: Service, picture: PictureFile, idempotency_key: str | None = None) -> Operation[Any]:
    if isinstance(picture, str) and picture.startswith(("http://", "https://")):
        content = yield from _fetched(picture)
    else:
        content = _content_of(picture)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the picture has {len(content)} bytes, and the service takes {MAX_FILE_BYTES}")
    upload = Upload({}, {"file": content})
    headers = {"Idempotency-Key": checked_key(idempotency_key)}
    return (yield from service.ask("POST", "/v1/images", None, headers, upload=upload, timeout=CHECK_S))


def _fetched(address: str) -> Operation[bytes]:
    try:
        response = yield Call("GET", address, is_elsewhere=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"{address}: {error or type(error).__name__}") from error
    assert isinstance(response, httpx.Response), "a Call is answered with a Response"
    if not response.is_success:
        raise OSError(f"{address}: answered {response.status_code}")
    if not is_expected(response, is_image=True, is_stream=False):
        raise OSError(f"{address}: is {response.headers.get('content-type', 'empty')}, and no PNG, JPEG or WebP")
    return response.content


def _content_of(picture: PictureFile) -> bytes:
    """Return the bytes of a picture that is here; a Pillow image becomes a PNG."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str) and picture.startswith("data:"):
        head, _, data = picture.partition(",")
        try:
            return base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
        except ValueError as error:
            raise OSError(f"the picture's data address is not base64: {error}") from None
    if isinstance(picture, str | Path):
        if not os.path.isfile(picture):  # which takes a text of any length for a name
            raise FileNotFoundError(f"{str(picture)[:200]}: no such file, and no image's id or address")
        return Path(picture).read_bytes()
    given: Any = picture
    if hasattr(given, "save"):
        file = BytesIO()
        given.save(file, "PNG")
        return file.getvalue()
    content = given.read() if hasattr(given, "read") and not isinstance(given, TextIOBase) else None
    if not isinstance(content, bytes):
        raise TypeError(
            "a picture is a path, an address, bytes, a file opened with 'rb', a Pillow image or an image of the service, "
            f"not {given!r}"
        )
    return content
