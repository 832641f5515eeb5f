"""Pictures that accounts bring, to draw from, to mask by or to enlarge: stored, counted, read, listed and deleted.

An account's picture is known by the digest of its PNG, which holds nothing but pixels, and stored and counted once. One
that was uploaded on purpose stays for the retention time; one that was brought for a job goes with the jobs that need
it. Its object is stored among those of jobs, in a folder named by its image id. Its record comes first: an object that
no record names would not be found again.
"""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from serve_app.domain.accounts import Caller
from serve_app.domain.audit import Actor
from serve_app.domain.durations import Position, from_epoch_ms, milliseconds
from serve_app.domain.errors import Forbidden, IdempotencyConflict, ImageQuotaExceeded, NotFound, StoreUnavailable
from serve_app.domain.jobs import Job, StoredImage, new_image_id
from serve_app.domain.requests import Variant, is_composite
from serve_app.jobs.deletion import JobDeletion
from serve_app.jobs.history import LOOKED_AT_ONCE, JobReader, PageSearch
from serve_app.jobs.images import ImageStore
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.process import Background, to_its_end
from serve_app.store.redis_client import RedisClient, read_records
from serve_app.store.script import Script

DECODED_AT_ONCE = 2
NO_SUCH = "There is no such image."
HELD_FOR = timedelta(minutes=10)
"""A picture is stored, and its job asked for, within this time; after a crash between the two it goes then."""
KEPT = "kept"
"""The user in whose name an upload on purpose is needed."""
LEAST_COUNTED = 64 << 10
"""An upload counts as at least this many bytes, so that records of tiny images do not fill Redis."""
_ID = re.compile(r"img_[a-z2-7]{26}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """An image that an account has uploaded, or that its job `job_id` has made; `key_id` is the API key that asked.

    `from_upload` says of a job's image that it was drawn from an uploaded one.
    """

    image: StoredImage
    key_id: str
    created_at: datetime
    expires_at: datetime
    job_id: str = ""
    from_upload: bool = True


class UploadRecords:
    """Reads and changes the records of uploads. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._add_upload = Script(redis, "jobs/add_upload")
        self._list_uploads = Script(redis, "jobs/list_uploads")

    async def get(self, image_id: str, *, account_id: str) -> Upload | None:
        """Return the upload, if it is the account's."""
        found = await self._read([image_id], account_id) if _ID.fullmatch(image_id) else []
        return found[0] if found else None

    async def page(
        self, account_id: str, *, limit: int, after: Position | None = None
    ) -> tuple[Sequence[Upload], Position | None]:
        """Return the account's uploads, newest first, after a position, and where the next page begins, if any."""
        search = PageSearch(self._list_uploads, calls=1, most=LOOKED_AT_ONCE)
        places, following = await search.page(limit, after, account=account_id, since=None)
        return await self._read([each.id for each in places], account_id), following

    async def existing(self, image_ids: Sequence[str]) -> set[str]:
        """Return which of the ids are those of uploads, of any account."""
        pipeline = self._redis.pipeline(transaction=False)
        for image_id in image_ids:
            pipeline.exists(redis_key("upload", image_id))
        found: list[int] = await pipeline.execute() if image_ids else []
        return {image_id for image_id, is_there in zip(image_ids, found, strict=True) if is_there}

    async def add(
        self,
        image: StoredImage,
        *,
        user: str,
        lasts: timedelta,
        account: str,
        key_id: str = "",
        idempotency_digest: str = "",
        body_digest: str = "",
    ) -> tuple[str, str]:
        """Record an upload that `user` needs for `lasts`; return a status of `add_upload.lua`, and the upload's id.

        The user is a call, or `KEPT` once the object is stored.
        """
        size = {"width": image.width, "height": image.height, "bytes": image.size_bytes}
        status, image_id = await self._add_upload(
            image_id=image.image_id,
            account=account,
            record=json.dumps({"uri": image.image_uri, **size, "sha256": image.sha256, "key_id": key_id}),
            counted=max(LEAST_COUNTED, image.size_bytes),
            max_bytes=int(self._settings.max_image_bytes_per_account),
            retention_ms=milliseconds(self._settings.retention),
            user=user,
            lasts_ms=milliseconds(lasts),
            idempotency_digest=idempotency_digest,
            body_digest=body_digest,
            idempotency_ms=milliseconds(self._settings.idempotency_life),
        )
        return status, image_id

    async def let_go(self, image_id: str, user: str) -> None:
        """End what a call needs of an upload: what nothing needs goes when `Deletions.remove_due_uploads` is called."""
        pipeline = self._redis.pipeline()
        pipeline.zrem(redis_key("image_uses", image_id), user)
        pipeline.zadd(redis_key("uploads_due"), {image_id: 0}, xx=True)
        await pipeline.execute()

    async def _read(self, image_ids: Sequence[str], account_id: str) -> list[Upload]:
        rows = await read_records(self._redis, image_ids, "upload")
        return [_read(image_id, row) for image_id, row in rows.items() if row["account"] == account_id]


@dataclass(frozen=True, slots=True)
class Hold:
    """Keeps the pictures that a call brings for a job, until it has asked for the job."""

    lasts: timedelta = HELD_FOR
    name: str = field(default_factory=lambda: f"hold_{secrets.token_hex(8)}")
    image_ids: list[str] = field(default_factory=list[str])


class Added(NamedTuple):
    """An uploaded image, and whether an earlier call with the same idempotency key had stored it."""

    upload: Upload
    replayed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploads:
    """What an account does with the images that it uploads. Every method may raise `StoreUnavailable`."""

    settings: Settings
    records: UploadRecords
    jobs: JobReader
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
        idempotency_key: str | None = None,
        hold: Hold | None = None,
        is_mask: bool = False,
    ) -> Added:
        """Store the picture at `file` as a PNG; of a mask, where it is transparent.

        One that the account has already is the same image. With a `hold` it is brought for a job; without, it stays.
        A client that disconnects does not stop it, nor ends its `place`, which holds the file, before it does. Raises
        `InvalidParameter`, `UnsupportedMediaType`, `IdempotencyConflict`, `ImageQuotaExceeded`.
        """
        work = self._add(caller, file, idempotency_key, hold, is_mask=is_mask)
        return await self.background.run_in(place, work)

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[Hold]:
        """Hold what a call brings; on leaving, pictures that no job needs and nobody uploaded on purpose go at once."""
        hold = Hold()
        try:
            yield hold
        finally:
            await self._release(hold)

    async def find(self, caller: Caller, image_id: str, *, interface: Variant | None = None) -> Upload:
        """Return an image that the account uploaded, or that one of its jobs has made; with `interface`, a job of it.

        Raises `NotFound`.
        """
        account_id = caller.account_id
        upload = await self.records.get(image_id, account_id=account_id) if interface is None else None
        if upload is None and (made := await self.jobs.image(image_id, account_id=account_id, variant=interface)):
            upload = self._made(*made)
        if upload is None:
            raise NotFound(NO_SUCH)
        return upload

    async def stored(self, caller: Caller, image_id: str, *, interface: Variant | None = None) -> Upload:
        """Return an image that `find` finds, whose file is there. Raises `NotFound`."""
        found = await self.find(caller, image_id, interface=interface)
        if not await self.images.exists(found.image.image_uri):
            raise NotFound(NO_SUCH)
        return found

    async def delete(self, caller: Caller, image_id: str, *, by: Actor) -> None:
        """Delete an image that the account uploaded.

        Raises `NotFound`; `JobUnfinished` while a job needs it; `Forbidden` for a key that is kept to some LoRAs and
        did not upload it.
        """
        upload = await self.find(caller, image_id)
        if upload.job_id:
            raise NotFound(
                f"Job {upload.job_id} made this image: delete it by DELETE /v1/jobs/{{id}}/images/{{image_id}}."
            )
        if caller.adapters is not None and upload.key_id != caller.key_id:
            raise Forbidden("This API key is restricted to certain LoRAs and may only delete images it uploaded.")
        await self.deletion.delete_upload(image_id, account_id=caller.account_id, by=by)

    def _made(self, job: Job, image: StoredImage) -> Upload:
        made_at = job.finished_at or job.created_at
        expires_at = made_at + self.settings.retention
        return Upload(
            image=image,
            key_id=job.key_id,
            created_at=made_at,
            expires_at=expires_at,
            job_id=job.id,
            from_upload=job.request is None or is_composite(job.request),
        )

    @to_its_end
    async def _release(self, hold: Hold) -> None:
        with suppress(StoreUnavailable):  # a hold ends by itself, later
            for image_id in hold.image_ids:
                await self.records.let_go(image_id, hold.name)
            await self.deletion.deletions.remove_due_uploads()

    async def _add(
        self, caller: Caller, file: Path, idempotency_key: str | None, hold: Hold | None, *, is_mask: bool
    ) -> Added:
        target = file.with_suffix(".png")
        async with self.decoding:
            from serve_app.jobs.picture_file import decode  # here, so that commands start without Pillow

            size = await decode(file, target, is_mask=is_mask)
        sent, png = await asyncio.to_thread(lambda: (file.read_bytes(), target.read_bytes()))
        image_id, account_id = new_image_id(), caller.account_id
        name = self.images.object_name(account_id, image_id, 1, 0, datetime.now(UTC))
        image = StoredImage(
            image_id=image_id,
            image_uri=self.images.uri(name),
            width=size.width,
            height=size.height,
            sha256=_digest(png),
            size_bytes=len(png),
        )
        of_call = {
            "account": account_id,
            "key_id": caller.key_id,
            "idempotency_digest": _digest(idempotency_key.encode()) if idempotency_key is not None else "",
            "body_digest": _digest(sent),
        }
        call = hold or Hold()
        status, there = await self.records.add(image, user=call.name, lasts=call.lasts, **of_call)
        if status == "conflict":
            raise IdempotencyConflict("This Idempotency-Key was used before with another body.")
        if status == "full":
            most = int(self.settings.max_image_bytes_per_account)
            raise ImageQuotaExceeded(
                f"Your account may store {most} bytes of uploaded images; delete some that GET /v1/images lists first."
            )
        call.image_ids.append(there)
        upload = await self.find(caller, there)
        if not await self.images.exists(upload.image.image_uri):
            await self.images.put(self.images.name(upload.image.image_uri), png)
        if hold is None and status != "replayed":
            await self.records.add(upload.image, user=KEPT, lasts=self.settings.retention, **of_call)
            upload = await self.records.get(there, account_id=account_id) or upload
        return Added(upload, replayed=status == "replayed")


def _read(image_id: str, fields: dict[str, str]) -> Upload:
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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
