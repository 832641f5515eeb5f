"""Images that accounts upload, to draw from, to mask by or to enlarge: stored, counted, read and deleted.

An upload's object is beside those of jobs, in a folder called by its image id. Its record is what commits it.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from serve_app.domain.accounts import Caller
from serve_app.domain.audit import Actor
from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.domain.errors import Forbidden, IdempotencyConflict, ImageQuotaExceeded, NotFound
from serve_app.domain.jobs import StoredImage, new_image_id
from serve_app.jobs.deletion import JobDeletion
from serve_app.jobs.images import ImageStore
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.process import Background
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

LEAST_COUNTED = 64 << 10
"""An upload counts as at least so many bytes, so that records of tiny images do not fill Redis."""
DECODED_AT_ONCE = 2
NO_SUCH = "There is no such image."
_ID = re.compile(r"img_[a-z2-7]{26}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """An image that an account has uploaded; `key_id` is the API key that sent it."""

    image: StoredImage
    key_id: str
    created_at: datetime
    expires_at: datetime


class Added(NamedTuple):
    """An uploaded image, and whether an earlier call with the same idempotency key had stored it."""

    upload: Upload
    replayed: bool


class UploadRecords:
    """Reads and adds the records of uploads. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._add_upload = Script(redis, "jobs/add_upload")

    async def get(self, image_id: str, *, account_id: str) -> Upload | None:
        """Return the upload, if it is the account's."""
        is_id = _ID.fullmatch(image_id)
        fields: dict[str, str] = await self._redis.hgetall(redis_key("upload", image_id)) if is_id else {}
        if fields.get("account") != account_id:
            return None
        image = StoredImage(
            image_id=image_id,
            image_uri=fields["uri"],
            width=int(fields["width"]),
            height=int(fields["height"]),
            sha256=fields["sha256"],
            size_bytes=int(fields["bytes"]),
        )
        created_at, expires_at = (from_epoch_ms(fields[name]) for name in ("created", "expires"))
        return Upload(image=image, key_id=fields["key_id"], created_at=created_at, expires_at=expires_at)

    async def existing(self, image_ids: Sequence[str]) -> set[str]:
        """Return which of the ids are those of uploads, of any account."""
        pipeline = self._redis.pipeline(transaction=False)
        for image_id in image_ids:
            pipeline.exists(redis_key("upload", image_id))
        found: list[int] = await pipeline.execute() if image_ids else []
        return {image_id for image_id, is_there in zip(image_ids, found, strict=True) if is_there}

    async def add(
        self, image: StoredImage, *, account_id: str, key_id: str, idempotency_key: str | None, body_sha256: str
    ) -> tuple[str, str]:
        """Record an upload whose object is stored; return a status of `add_upload.lua`, and the id of the upload."""
        record = {
            "uri": image.image_uri,
            "width": image.width,
            "height": image.height,
            "bytes": image.size_bytes,
            "sha256": image.sha256,
            "key_id": key_id,
        }
        status, image_id = await self._add_upload(
            image_id=image.image_id,
            account=account_id,
            record=json.dumps(record),
            counted=max(LEAST_COUNTED, image.size_bytes),
            max_bytes=int(self._settings.max_image_bytes_per_account),
            retention_ms=milliseconds(self._settings.retention),
            idempotency_digest="" if idempotency_key is None else _digest(idempotency_key.encode()),
            body_digest=body_sha256,
            idempotency_ms=milliseconds(self._settings.idempotency_life),
        )
        return status, image_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploads:
    """What an account does with the images that it uploads. Every method may raise `StoreUnavailable`."""

    settings: Settings
    records: UploadRecords
    images: ImageStore
    deletion: JobDeletion
    background: Background
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DECODED_AT_ONCE))
    """Places for processes that read customers' files, each with limits of its own."""

    async def add(
        self,
        caller: Caller,
        file: Path,
        *,
        place: AsyncExitStack,
        idempotency_key: str | None,
        is_mask: bool = False,
    ) -> Added:
        """Store the picture at `file` as a PNG; of a mask, where it is transparent.

        A client that disconnects does not stop it, nor ends its `place`, which holds the file, before it does. Raises
        `InvalidParameter`, `UnsupportedMediaType`, `IdempotencyConflict`, `ImageQuotaExceeded`.
        """
        held = place.pop_all()

        async def work() -> Added:
            async with held:
                return await self._add(caller, file, idempotency_key, is_mask=is_mask)

        return await self.background.run_to_end(work())

    async def find(self, caller: Caller, image_id: str) -> Upload:
        """Return an image that the account uploaded. Raises `NotFound`."""
        upload = await self.records.get(image_id, account_id=caller.account_id)
        if upload is None:
            raise NotFound(NO_SUCH)
        return upload

    async def delete(self, caller: Caller, image_id: str, *, by: Actor) -> None:
        """Delete an image that the account uploaded; a job that needs it and has not read it yet fails.

        Raises `NotFound`, and `Forbidden` for a key that is kept to some LoRAs and did not upload it.
        """
        upload = await self.find(caller, image_id)
        if caller.adapters is not None and upload.key_id != caller.key_id:
            raise Forbidden("This API key is restricted to certain LoRAs and may only delete images it uploaded.")
        folder = _folder(self.images.name(upload.image.image_uri))
        await self.deletion.delete_upload(image_id, folder, account_id=caller.account_id, by=by)

    async def _add(self, caller: Caller, file: Path, idempotency_key: str | None, *, is_mask: bool) -> Added:
        target = file.with_suffix(".png")
        async with self.decoding:
            from serve_app.jobs.picture_file import decode  # here, so that commands start without Pillow

            size = await decode(file, target, is_mask=is_mask)
        sent, png = await asyncio.to_thread(lambda: (file.read_bytes(), target.read_bytes()))
        image_id = new_image_id()
        name = self.images.object_name(caller.account_id, image_id, 1, 0, datetime.now(UTC))
        image = StoredImage(
            image_id=image_id,
            image_uri=await self.images.put(name, png),
            width=size.width,
            height=size.height,
            sha256=_digest(png),
            size_bytes=len(png),
        )
        status, there = await self.records.add(
            image,
            account_id=caller.account_id,
            key_id=caller.key_id,
            idempotency_key=idempotency_key,
            body_sha256=_digest(sent),
        )
        if status != "added":
            await self.images.delete_folder(_folder(name))
        if status == "conflict":
            raise IdempotencyConflict("This Idempotency-Key was used before with another body.")
        if status == "full":
            most = int(self.settings.max_image_bytes_per_account)
            raise ImageQuotaExceeded(f"Your account may store {most} bytes of uploaded images; delete some first.")
        return Added(await self.find(caller, there), replayed=status == "replayed")


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
