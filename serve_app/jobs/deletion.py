"""Deletes jobs and images: one script removes the record and lists its objects, which go next, through any crash."""

import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from serve_app.accounts.audit import AuditLog
from serve_app.domain.audit import Act, Actor
from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.domain.errors import JobUnfinished, NotFound, StoreUnavailable, UnreadableRecord
from serve_app.domain.jobs import StoredImage
from serve_app.jobs.compact_form import RESULT, Result, pack_result, request_bytes, unpack_result
from serve_app.jobs.images import ImageStore
from serve_app.jobs.records import JOB_BYTES, UNREADABLE
from serve_app.store.keys import redis_key
from serve_app.store.process import Background, to_its_end
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Argument, Rewrite, Script

LOOK_AGAIN = timedelta(minutes=10)
"""An upload that an unfinished job needs is looked at again after this long."""
CHANGED = "changed"
"""A script answers this when the job's result is not the one that its caller has read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedObjects:
    """The objects of a deleted job or image called `name`: a whole folder (or ''), and objects by URI."""

    name: str
    folder: str
    image_uris: Sequence[str]
    deleted_at: datetime


class Deleted(NamedTuple):
    """Whose job or image was deleted, and under which name its objects are listed."""

    account_id: str
    name: str


class Deletions:
    """Deletes records and keeps the list of their objects. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, images: ImageStore, *, rewrite: Rewrite | None = None) -> None:
        self._redis = redis
        self._images = images
        self._delete_job = Script(redis, "jobs/delete_job", rewrite)
        self._delete_image = Script(redis, "jobs/delete_image", rewrite)
        self._delete_upload = Script(redis, "jobs/delete_upload", rewrite)
        self._remove_due_uploads = Script(redis, "jobs/remove_due_uploads", rewrite)

    async def delete_job(self, job_id: str, *, account_id: str | None, force: bool = False) -> Deleted | None:
        """Delete an ended job, or with `force` any.

        None when the account has no such job (any more); `account_id=None` is the operator. Raises `JobUnfinished`, for
        an account also while another job needs one of its images.
        """
        call = secrets.token_hex(8)
        while True:
            found = await self._find(job_id)
            images = found.result.images
            image_ids = [image.image_id for image in images]
            name = await self._delete_job(**found.args(account_id, call, images), force=force, image_ids=image_ids)
            if name == "unfinished":
                raise JobUnfinished("The job has not ended; cancel it first.")
            if name != CHANGED:
                return _deleted(found.owner, name, job_id)

    async def delete_image(self, job_id: str, image_id: str, *, account_id: str | None) -> Deleted | None:
        """Delete one image of a completed job, and the job with its last one.

        None when the account has no such job, or the job no such image (any more). Raises `JobUnfinished` while another
        job needs the image, unless the operator asks.
        """
        call = secrets.token_hex(8)
        while True:
            found = await self._find(job_id)
            images = found.result.images
            deleted = [image for image in images if image.image_id == image_id]
            if not deleted:
                return None
            kept = tuple(image for image in images if image.image_id != image_id)
            rest = pack_result(job_id, found.result._replace(images=kept)) if kept else None
            name = await self._delete_image(**found.args(account_id, call, deleted), image_id=image_id, rest=rest)
            if name != CHANGED:
                return _deleted(found.owner, name, image_id, job_id)

    async def delete_upload(self, image_id: str, *, account_id: str) -> Deleted | None:
        """Delete an image that the account uploaded; None when it has no such image. Raises `JobUnfinished`."""
        name = await self._delete_upload(image_id=image_id, account=account_id, call=secrets.token_hex(8))
        return _deleted(account_id, name, image_id)

    async def remove_due_uploads(self, limit: int = 100) -> int:
        """Remove uploaded images that nothing needs any more; return how many were looked at, of at most `limit`."""
        return await self._remove_due_uploads(limit=limit, pause_ms=milliseconds(LOOK_AGAIN), call="")

    async def objects(self, name: str) -> DeletedObjects | None:
        """Return the objects of one deleted job or image, while they are on the list."""
        row = await self._redis.hget(redis_key("deletions"), name)
        return _read(name, row) if row else None

    async def listed(self) -> list[DeletedObjects]:
        rows: dict[str, str] = await self._redis.hgetall(redis_key("deletions"))
        return [_read(name, text) for name, text in rows.items()]

    async def forget(self, name: str) -> None:
        """Take a deleted job or image off the list: its objects are gone."""
        await self._redis.hdel(redis_key("deletions"), name)

    async def _find(self, job_id: str) -> "_Found":
        """Read what never changes of a job ('' for what is missing), and its result as it is now."""
        fields: dict[str, str] = await self._redis.hgetall(redis_key("job", job_id))
        owner, folder, result = fields.get("account", ""), "", Result()
        size = JOB_BYTES + request_bytes(fields)
        with suppress(*UNREADABLE):
            created_at = from_epoch_ms(fields["created"])
            folder = self._images.job_folder(owner, job_id, created_at) if owner else ""
        with suppress(UnreadableRecord):
            result = unpack_result(job_id, fields)
        return _Found(job_id, owner, folder, result, fields.get(f"{RESULT}0", ""), size)


def _deleted(owner: str, name: str, *own: str) -> Deleted | None:
    """Read a script's answer: '', one of its `own` names, or the job that needs what was to be deleted."""
    if name and name not in own:
        raise JobUnfinished(f"Job {name} needs this image and has not ended: wait for it, or cancel it first.")
    return Deleted(owner, name) if name else None


class _Found(NamedTuple):
    job_id: str
    owner: str
    folder: str
    result: Result
    first: str
    bytes: int

    def args(self, account_id: str | None, call: str, images: Sequence[StoredImage]) -> dict[str, Argument]:
        """Return the arguments of `deletion.lua` for a deletion of these images."""
        return {
            "job_id": self.job_id,
            "account": account_id,
            "folder": self.folder,
            "call": call,
            "uris": json.dumps([image.image_uri for image in images]),
            "first": self.first.encode(errors="surrogateescape"),
            "bytes": self.bytes,
        }


def _read(name: str, text: str) -> DeletedObjects:
    row = json.loads(text)
    uris: list[str] = json.loads(row["uris"])
    return DeletedObjects(name=name, folder=row["folder"], image_uris=uris, deleted_at=from_epoch_ms(row["at"]))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDeletion:
    """Deletes jobs and images with their objects, and records who did."""

    deletions: Deletions
    images: ImageStore
    audit: AuditLog
    background: Background

    @to_its_end
    async def delete_job(self, job_id: str, *, account_id: str | None, by: Actor) -> None:
        """Delete an ended job with its prompt and images; `account_id=None` is the operator.

        Raises `NotFound`, `JobUnfinished`, `StoreUnavailable`. A storage that does not answer does not fail the call:
        the objects stay on the list, and go when it answers.
        """
        deleted = await self.deletions.delete_job(job_id, account_id=account_id)
        await self._finish(deleted, job_id, Act.JOB_DELETED, by)

    @to_its_end
    async def delete_image(self, job_id: str, image_id: str, *, account_id: str | None, by: Actor) -> None:
        """Delete one image of a job, and the job with its last one. Raises as `delete_job`."""
        deleted = await self.deletions.delete_image(job_id, image_id, account_id=account_id)
        await self._finish(deleted, image_id, Act.IMAGE_DELETED, by)

    @to_its_end
    async def delete_upload(self, image_id: str, *, account_id: str, by: Actor) -> None:
        """Delete an image that the account uploaded. Raises as `delete_job`."""
        deleted = await self.deletions.delete_upload(image_id, account_id=account_id)
        await self._finish(deleted, image_id, Act.IMAGE_DELETED, by)

    async def _finish(self, deleted: Deleted | None, subject: str, act: Act, by: Actor) -> None:
        if deleted is None:
            raise NotFound("There is no such job or image.")
        await self.audit.record(deleted.account_id, act, by, subject)
        objects = await self.deletions.objects(deleted.name)
        try:
            if objects is not None:
                await remove_objects(self.images, objects)
            await self.deletions.remove_due_uploads()
        except StoreUnavailable as error:
            _log.warning("objects of %s are left to the housekeeper: %s", deleted.name, error)


async def remove_listed_objects(deletions: Deletions, images: ImageStore, *, lease: timedelta) -> int:
    """Remove the objects of deleted jobs; return how many jobs and images went off the list.

    A worker that was still writing when its job was deleted stops within its lease: each is looked for once more after
    two.
    """
    settled_before = datetime.now(UTC) - 2 * lease
    forgotten = 0
    for deleted in await deletions.listed():
        await remove_objects(images, deleted)
        if deleted.deleted_at < settled_before:
            await deletions.forget(deleted.name)
            forgotten += 1
    return forgotten


async def remove_objects(images: ImageStore, deleted: DeletedObjects) -> None:
    """Remove a deleted job's or image's objects. Safe to repeat."""
    for image_uri in deleted.image_uris:
        try:
            await images.delete(image_uri)
        except NotFound:  # the object is of a storage that is no longer the service's
            continue
    if deleted.folder:
        await images.delete_folder(deleted.folder)
