"""Deletes jobs and images: the record first, then the objects, through any crash in between."""

import logging
from datetime import UTC, datetime

from serve_app.domain.audit import Act
from serve_app.domain.errors import NotFound, StoreUnavailable
from serve_app.service.resources import Resources
from serve_app.stores.deletions import Deleted, DeletedObjects

_log = logging.getLogger(__name__)


async def delete_job(
    resources: Resources, job_id: str, *, account_id: str | None, actor: str, address: str = ""
) -> None:
    """Delete an ended job with its prompt and images; `account_id=None` is the operator.

    Raises `NotFound`, `JobUnfinished`, `StoreUnavailable`. A storage that does not answer does not fail the call: the
    objects stay on the list, and go when it answers.
    """

    async def work() -> None:
        deleted = await resources.deletions.delete_job(job_id, account_id=account_id)
        await _finish(resources, deleted, job_id, Act.JOB_DELETED, actor=actor, address=address)

    await resources.run_to_end(work())


async def delete_image(
    resources: Resources, job_id: str, image_id: str, *, account_id: str | None, actor: str, address: str = ""
) -> None:
    """Delete one image of a job, and the job with its last one. Raises as `delete_job`."""

    async def work() -> None:
        deleted = await resources.deletions.delete_image(job_id, image_id, account_id=account_id)
        await _finish(resources, deleted, image_id, Act.IMAGE_DELETED, actor=actor, address=address)

    await resources.run_to_end(work())


async def remove_listed_objects(resources: Resources) -> int:
    """Remove the objects of deleted jobs; return how many jobs and images went off the list.

    A worker that was still writing when its job was deleted stops within its lease: each is looked for once more after two.
    """
    settled_before = datetime.now(UTC) - 2 * resources.settings.lease
    forgotten = 0
    for deleted in await resources.deletions.listed():
        await remove_objects(resources, deleted)
        if deleted.deleted_at < settled_before:
            await resources.deletions.forget(deleted.name)
            forgotten += 1
    return forgotten


async def remove_objects(resources: Resources, deleted: DeletedObjects) -> None:
    """Remove a deleted job's or image's objects. Safe to repeat."""
    for image_uri in deleted.image_uris:
        try:
            await resources.images.delete(image_uri)
        except NotFound:  # of a storage that is no longer the service's
            continue
    if deleted.folder:
        await resources.images.delete_folder(deleted.folder)


async def _finish(
    resources: Resources, deleted: Deleted | None, subject: str, act: Act, *, actor: str, address: str
) -> None:
    if deleted is None:
        raise NotFound("There is no such job or image.")
    await resources.audit.record(deleted.account_id, act, actor=actor, subject=subject, address=address)
    objects = await resources.deletions.objects(deleted.name)
    try:
        if objects is not None:
            await remove_objects(resources, objects)
    except StoreUnavailable as error:
        _log.warning("objects of %s are left to the housekeeper: %s", deleted.name, error)
