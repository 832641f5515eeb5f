"""Stores images in object storage, signs the URLs that open them in a browser, and tells whether they still open."""

import asyncio
import hashlib
import hmac
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from serve_app.atomic_files import PRIVATE_FOLDER, write_atomically
from serve_app.domain.errors import NotFound, StoreUnavailable
from serve_app.domain.metrics import STORAGE_ERRORS, STORAGE_SECONDS
from serve_app.domain.requests import ImageFormat
from serve_app.settings import Settings
from serve_app.store.measures import Measures
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script
from serve_app.store.storage import PROBES, in_storage_thread, open_filesystem

_Answer = TypeVar("_Answer")

SAME_URL_S, MOST_URLS = 300, 10_000

PROBE_EVERY_S, PROBE_WAIT_S = 15.0, 3.0
"""Whether the storage can be written is tried at most once in `PROBE_EVERY_S`, and awaited for `PROBE_WAIT_S`."""

IMAGES = "images"
_STEM = r"images/[0-9a-z]{1,64}/\d{4}/\d{2}/\d{2}/[A-Za-z0-9_]{1,64}/a\d{1,9}-\d{1,3}"
_IMAGE = re.compile(rf"{_STEM}\.(png|jpg|webp)")
"""The form of an image's name. A thumbnail has no address of its own."""
_URI = re.compile(rf"[a-z][a-z0-9+.-]*://(?:.*/)?({_STEM}(?:\.png|\.jpg|(?:\.thumbnail)?\.webp))")
_FOLDER = re.compile(r"images/[0-9a-z]{1,64}(/\d{4}/\d{2}/\d{2}/[A-Za-z0-9_]{1,64})?")
_EXPIRY = re.compile(r"[0-9]{1,12}")
_TYPE_ARGUMENTS = {"s3": "ContentType", "gs": "content_type"}
"""The argument of these storages for the content type, with which a presigned address answers."""


class ImageStore:
    """Images of any fsspec storage: a local directory, `memory://`, `s3://`, `gcs://`.

    An image is visible only whole; its name is never reused, because it holds the job and the attempt. In the data
    directory it is its owner's alone; in a local folder that the operator names, it is open to all who may open that
    folder.
    """

    def __init__(self, settings: Settings, measures: Measures | None = None) -> None:
        self._settings = settings
        self._measures = measures
        self._files, root = open_filesystem(settings.storage, settings.storage_options)
        self._root = root.rstrip("/")
        self._is_local = "file" in _protocols(self._files)
        self._urls: dict[tuple[str, str], tuple[int, str]] = {}
        self._probed = 0.0
        self._probe: asyncio.Task[bool] | None = None
        endpoint = settings.image_endpoint
        self._is_presigned = endpoint != "service" and not self._is_local and "memory" not in _protocols(self._files)
        self._signer = self._files
        if self._is_presigned and endpoint:
            own = dict(settings.storage_options.get("client_kwargs") or {}) | {"endpoint_url": endpoint}
            options = {**settings.storage_options, "endpoint_url": None, "client_kwargs": own}
            self._signer, _ = open_filesystem(settings.storage, options)

    @property
    def local_folder(self) -> Path | None:
        """The folder of this machine where images are; None for object storage."""
        return Path(self._root) if self._is_local else None

    def object_name(
        self,
        account_id: str,
        job_id: str,
        attempt: int,
        index: int,
        when: datetime,
        form: ImageFormat = ImageFormat.PNG,
    ) -> str:
        """Name an attempt's image. No other attempt can overwrite it; the account is hashed."""
        return f"{self.job_folder(account_id, job_id, when)}/a{attempt}-{index}{form.suffix}"

    def account_folder(self, account_id: str) -> str:
        owner = hmac.digest(self._settings.pepper_bytes, f"images of {account_id}".encode(), "sha256").hex()[:32]
        return f"{IMAGES}/{owner}"

    def job_folder(self, account_id: str, job_id: str, when: datetime) -> str:
        """Name the folder of the images of all attempts at a job that was accepted at `when`."""
        return f"{self.account_folder(account_id)}/{when:%Y/%m/%d}/{job_id}"

    def uri(self, name: str) -> str:
        return f"{self._settings.storage.rstrip('/')}/{name}"

    def name(self, image_uri: str) -> str:
        """Return the name of an image or thumbnail, which is the end of its URI.

        The beginning is where it was stored: a record keeps it when the storage has moved, or was restored elsewhere.
        Raises `NotFound` for any other URI.
        """
        found = _URI.fullmatch(image_uri)
        if found is None:
            raise NotFound("There is no such image.")
        return found[1]

    async def put(self, name: str, content: bytes) -> str:
        """Store an image and return its URI. Safe to repeat. Raises `StoreUnavailable`."""
        path = self._path(name)
        write = self._write_local if self._is_local else self._write_object
        await self._in_thread(lambda: write(path, content), doing="write")
        return self.uri(name)

    async def get(self, image_uri: str) -> bytes:
        """Read an image or thumbnail. Raises `NotFound`, `StoreUnavailable`."""
        path = self._path(self.name(image_uri))
        try:
            return await self._in_thread(lambda: self._files.cat_file(path), doing="read")
        except FileNotFoundError as missing:
            raise NotFound("There is no such image.") from missing

    async def delete(self, image_uri: str) -> None:
        """Remove an image and its thumbnail; nothing happens when they are not there."""
        for uri in (image_uri, thumbnail_uri(image_uri)):
            path = self._path(self.name(uri))
            with suppress(FileNotFoundError):
                await self._in_thread(lambda path=path: self._files.rm_file(path), doing="delete")

    async def delete_folder(self, folder: str) -> None:
        """Remove the folder of a job or an account with all images in it. Raises `NotFound` for any other folder."""
        if not _FOLDER.fullmatch(folder):
            raise NotFound("no such folder")
        path = self._path(folder)
        with suppress(FileNotFoundError):
            await self._in_thread(lambda: self._files.rm(path, recursive=True), doing="delete")

    async def exists(self, image_uri: str) -> bool:
        path = self._path(self.name(image_uri))
        return await self._in_thread(lambda: bool(self._files.exists(path)), doing="lookup")

    async def is_writable(self) -> bool:
        """Return whether an object can be written and removed now, or could when that was tried last.

        One try at a time is under way. A storage that does not answer in time counts as one that cannot be written.
        """
        now, probe = time.monotonic(), self._probe
        if probe is None or (probe.done() and now - self._probed >= PROBE_EVERY_S):
            self._probed, self._probe = now, (probe := asyncio.create_task(self._try_to_write()))
        answered, _ = await asyncio.wait({probe}, timeout=PROBE_WAIT_S)
        return bool(answered) and probe.result()

    async def names(self, folder: str = IMAGES) -> list[str]:
        """List every object under `folder`, by name."""
        path = self._path(folder)
        try:
            found = await self._in_thread(lambda: list(self._files.find(path)), doing="listing")
        except FileNotFoundError:
            return []
        return [found_path.removeprefix(self._path("")) for found_path in found]

    async def folders(self, folder: str) -> list[str]:
        """List the folders directly in `folder`, by name; none while the storage is empty."""
        path = self._path(folder)
        try:
            rows = await self._in_thread(lambda: list(self._files.ls(path, detail=True)), doing="listing")
        except FileNotFoundError:
            return []
        return [row["name"].rstrip("/").removeprefix(self._path("")) for row in rows if row["type"] == "directory"]

    def url(self, image_uri: str, *, base_url: str) -> str:
        """Return a URL that opens without a key for `image_url_life`, or up to a hundredth longer.

        For local storage, or where `image_endpoint` says so, it is ours, else presigned. It is the same for that
        hundredth, or `SAME_URL_S`, so that polls need not sign it again and agree. The time is this machine's, here and
        where the URL is verified.
        """
        now, life = int(time.time()), int(self._settings.image_url_life.total_seconds())
        period = max(1, min(SAME_URL_S, life // 100))
        same_until = now - now % period + period
        known = self._urls.get((image_uri, base_url))
        if known is not None and known[0] == same_until and period > 1:
            return known[1]
        if len(self._urls) >= MOST_URLS:
            self._urls.clear()
        url = self._sign(image_uri, base_url, now, same_until - now + life if period > 1 else life)
        self._urls[image_uri, base_url] = (same_until, url)
        return url

    def _sign(self, image_uri: str, base_url: str, now: int, life: int) -> str:
        name = self.name(image_uri)
        if self._is_presigned:
            return self._signer.sign(self._path(name), expiration=life)
        expires = now + life
        kid = next(iter(self._settings.url_keys))
        query = urlencode({"exp": expires, "kid": kid, "sig": self._signature(name, expires, kid)})
        return f"{(self._settings.public_url or base_url).rstrip('/')}/files/{quote(name)}?{query}"

    def verify(self, name: str, exp: int | str, kid: str, sig: str) -> bool:
        """Check that a URL is one of ours, unchanged and not expired."""
        if not _EXPIRY.fullmatch(str(exp)) or kid not in self._settings.url_keys:
            return False
        if not _IMAGE.fullmatch(name) or int(exp) < time.time():
            return False
        return hmac.compare_digest(self._signature(name, int(exp), kid).encode(), sig.encode(errors="replace"))

    def _signature(self, name: str, expires: int, kid: str) -> str:
        text = f"GET\n/files/{name}\n{expires}\n{kid}"
        return hmac.digest(self._settings.url_keys[kid], text.encode(), hashlib.sha256).hex()

    async def _in_thread(self, call: Callable[[], _Answer], *, doing: str) -> _Answer:
        """Call the storage, and measure how long it takes."""
        began = time.perf_counter()
        try:
            return await in_storage_thread(call, doing=doing)
        except StoreUnavailable:
            if self._measures is not None:
                self._measures.count(STORAGE_ERRORS, doing)
            raise
        finally:
            if self._measures is not None:
                self._measures.observe(STORAGE_SECONDS, time.perf_counter() - began, doing)

    async def _try_to_write(self) -> bool:
        path = self._path(f"{IMAGES}/0/1970/01/01/probe/a{secrets.randbelow(10**9)}-0.png")  # a name that no job has

        def write_and_remove() -> None:
            (self._write_local if self._is_local else self._write_object)(path, b"probe")
            with suppress(FileNotFoundError):  # a sweep has removed it already
                self._files.rm_file(path)

        try:
            await in_storage_thread(write_and_remove, doing="probe", pool=PROBES)
        except (StoreUnavailable, FileNotFoundError):
            return False
        return True

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write_object(self, path: str, content: bytes) -> None:
        """Upload, and check the stored size: some storages report a truncated upload as a success."""
        told = next((told for protocol, told in _TYPE_ARGUMENTS.items() if protocol in _protocols(self._files)), None)
        self._files.pipe_file(path, content, **{told: ImageFormat.of_name(path).media_type} if told else {})
        stored = self._files.info(path)["size"]
        if stored != len(content):
            raise OSError(f"{stored} of {len(content)} bytes were stored")

    def _write_local(self, path: str, content: bytes) -> None:
        folder_mode = _mode(Path(self._root)) if self._settings.storage_url else PRIVATE_FOLDER
        write_atomically(Path(path), content, mode=folder_mode & 0o666, folder_mode=folder_mode)


def thumbnail_uri(image_uri: str) -> str:
    """Return where the thumbnail of an image is kept; a thumbnail's own URI stays as it is."""
    return image_uri.rpartition(".")[0].removesuffix(".thumbnail") + ".thumbnail.webp"


def _mode(folder: Path) -> int:
    """Return a folder's permissions, with all of its owner's; those of a private one while there is no folder."""
    try:
        return stat.S_IMODE(folder.stat().st_mode) & 0o777 | PRIVATE_FOLDER
    except FileNotFoundError:
        return PRIVATE_FOLDER


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


class ImageAccess:
    """Tells whether the addresses of images still open. May raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._image_opens = Script(redis, "jobs/image_opens", writes=False)

    async def is_open(self, name: str) -> bool:
        """Return whether the job, or uploaded image, of this id exists and its account is not disabled."""
        return bool(await self._image_opens(name=name))
