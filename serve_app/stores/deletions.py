"""Deletes jobs and images: one script removes the keys and lists the objects still to be removed."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import JobUnfinished, UnreadableRecord
from serve_app.stores.compact_form import is_packed
from serve_app.stores.compaction import Compaction
from serve_app.stores.images import ImageStore
from serve_app.stores.records import UNREADABLE, read_images
from serve_app.stores.redis_keys import redis_key
from serve_app.stores.script import Rewrite, Script


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedObjects:
    """Objects of a deleted job or image, `name`: a whole folder (or ''), and objects by URI."""

    name: str
    folder: str
    image_uris: Sequence[str]
    deleted_at: datetime


class Deleted(NamedTuple):
    """A deletion that happened: whose, and the name of the objects on the list."""

    account_id: str
    name: str


class Deletions:
    """Deletes records and keeps the list of their objects. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: Redis, images: ImageStore, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._images = images
        self._compaction = Compaction(redis)
        self._delete_job = Script(redis, "delete_job", rewrite)
        self._delete_image = Script(redis, "delete_image", rewrite)

    async def delete_job(self, job_id: str, *, account_id: str | None, force: bool = False) -> Deleted | None:
        """Delete an ended job, or with `force` any.

        None when the account has no such job (any more); `account_id=None` is the operator. Raises `JobUnfinished`.
        """
        owner, folder = await self._place(job_id)
        name = await self._delete_job(
            job_id=job_id, account=account_id, folder=folder, call=secrets.token_hex(8), force=force
        )
        if name == "unfinished":
            raise JobUnfinished("The job has not ended; cancel it first.")
        return Deleted(owner, name) if name else None

    async def delete_image(self, job_id: str, image_id: str, *, account_id: str | None) -> Deleted | None:
        """Delete one image of a completed job, and the job with its last one.

        None when the account has no such job, or the job no such image (any more).
        """
        owner, folder = await self._place(job_id)
        name = await self._delete_image(
            job_id=job_id, account=account_id, folder=folder, call=secrets.token_hex(8), image_id=image_id
        )
        return Deleted(owner, name) if name else None

    async def objects(self, name: str) -> DeletedObjects | None:
        """The objects of one deleted job or image, while they are on the list."""
        row = await self._redis.hget(redis_key("deletions"), name)
        return _read(name, row) if row else None

    async def listed(self) -> list[DeletedObjects]:
        """All objects on the list."""
        rows: dict[str, str] = await self._redis.hgetall(redis_key("deletions"))
        return [_read(name, text) for name, text in rows.items()]

    async def forget(self, name: str) -> None:
        """Take a deleted job or image off the list: its objects are gone."""
        await self._redis.hdel(redis_key("deletions"), name)

    async def _place(self, job_id: str) -> tuple[str, str]:
        """Return a job's account and folder, which never change, '' for what is missing.

        The job's record is whole afterwards (see `compaction.py`).
        """
        fields: dict[str, str] = await self._redis.hgetall(redis_key("job", job_id))
        owner, created = fields.get("account"), fields.get("created", "")
        try:
            if is_packed(fields):
                created = (await self._compaction.expand(job_id, fields))["created"]
            return owner or "", self._images.job_folder(owner, job_id, from_epoch_ms(created)) if owner else ""
        except (UnreadableRecord, *UNREADABLE):
            return owner or "", ""


def _read(name: str, text: str) -> DeletedObjects:
    row = json.loads(text)
    try:
        images = read_images(row["images"])
    except UnreadableRecord:  # what remains is the folder, which holds them all
        images = ()
    uris = [image.image_uri for image in images]
    return DeletedObjects(name=name, folder=row["folder"], image_uris=uris, deleted_at=from_epoch_ms(row["at"]))
