"""Housekeeping ends expired leases and waits, removes objects without a record, and follows the catalog file.

It also delivers webhooks.
"""

import asyncio
import logging
from datetime import UTC, date, datetime, timedelta

from serve_app.accounts.accounts import AccountStore
from serve_app.domain.jobs import Job
from serve_app.jobs.deletion import Deletions, remove_listed_objects
from serve_app.jobs.history import JobReader
from serve_app.jobs.images import IMAGES, ImageStore, thumbnail_uri
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.queue import REAPED_AT_ONCE, JobQueue
from serve_app.jobs.samples import LoraSamples, SampleDrawing
from serve_app.jobs.uploads import UploadRecords
from serve_app.loras.applied_catalog import AppliedCatalog, CatalogFollower
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.registration import UploadPlaces
from serve_app.loras.stored_weights import LoraFiles, LoraWeights
from serve_app.loras.weights import WeightStore
from serve_app.operations.account_deletion import AccountDeletion
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.keys import redis_key
from serve_app.store.measures import MemoryReserve
from serve_app.store.process import Process, repeat
from serve_app.store.storage import DiskReserve, Space
from serve_app.webhooks.delivery import JobRecord, WebhookDelivery

_log = logging.getLogger(__name__)

BATCH = 75
"""A script removes at most this many uploads, in a few milliseconds, so that nobody waits behind it."""
SWEEP_EVERY = timedelta(hours=1)
REMOVE_EVERY = timedelta(seconds=30)
"""How often what deletions left is removed: objects that could not be removed at once or that a worker wrote meanwhile,
uploads whose time is over, and accounts whose deletion was cut short."""


class Housekeeping:
    """The parts that the housekeeper's loops work with."""

    def __init__(self, process: Process, record_of: JobRecord) -> None:
        """Compose the parts. Webhooks carry a job as `record_of` makes it. Raises `BadModeration`."""
        redis, settings = process.redis, process.settings
        self.redis = redis
        self.settings = settings
        self.queue = JobQueue(redis, settings)
        self.jobs = JobReader(redis)
        self.images = ImageStore(settings, process.measures)
        self.uploaded = UploadRecords(redis, settings)
        self.deletions = Deletions(redis, self.images)
        self.accounts = AccountDeletion(process, self.images)
        self.weights = LoraWeights(redis, LoraFiles(settings))
        self.catalog = AppliedCatalog(redis, settings)
        self.uploads = UploadPlaces(settings.data_dir)
        self.webhooks = WebhookDelivery(redis, settings, jobs=self.jobs, images=self.images, record_of=record_of)
        make_space = WeightStore(settings).make_space
        self.samples = SampleDrawing(
            settings=settings,
            waiting=LoraSamples(redis),
            catalog=CatalogReader(redis),
            applied_catalog=self.catalog,
            accounts=AccountStore(redis, settings),
            queue=self.queue,
            space=Space(
                DiskReserve(settings, self.images.local_folder, self.uploads.sweep, make_space), MemoryReserve(redis)
            ),
            moderation=Moderation(settings),
        )

    async def may_sweep(self, every: timedelta) -> bool:
        """Return True to one caller per interval among all processes: a lock in Redis expires by itself."""
        return bool(await self.redis.set(redis_key("sweep_lock"), "1", nx=True, px=every))


async def reap_forever(
    parts: Housekeeping,
    *,
    every: timedelta = timedelta(seconds=1),
    sweep_every: timedelta = SWEEP_EVERY,
    look_every: timedelta = timedelta(seconds=1),
    remove_every: timedelta = REMOVE_EVERY,
) -> None:
    """Reap, sweep, follow the catalog file, draw samples and deliver webhooks until canceled, through any outage.

    It also restarts the embedded Redis. Any number of processes may run it.
    """
    follower = CatalogFollower(parts.catalog, parts.settings.catalog)
    async with asyncio.TaskGroup() as group:
        for name, work, pause in (
            ("reaping", lambda: _reap(parts.queue, parts.settings), every),
            ("sweeping", lambda: _sweep_in_turn(parts, sweep_every), sweep_every),
            ("removing deleted objects", lambda: _remove_deleted(parts), remove_every),
            ("following the catalog file", follower.look, look_every),
            ("drawing a sample", parts.samples.draw_next, look_every),
        ):
            group.create_task(repeat(name, work, pause.total_seconds(), _log.warning))
        group.create_task(parts.webhooks.deliver_forever())


async def _reap(queue: JobQueue, settings: Settings) -> None:
    """Reap all; where that fails, start the embedded Redis if it is not running."""
    try:
        while await queue.reap() >= REAPED_AT_ONCE:
            pass
    except Exception:
        if not settings.redis_url:
            await asyncio.to_thread(ensure_redis, settings.data_dir)
        raise


async def _sweep_in_turn(parts: Housekeeping, every: timedelta) -> None:
    if await parts.may_sweep(every):
        removed = await sweep(parts.images, parts.jobs, parts.uploaded, parts.settings)
        _log.info("the sweeper removed %d objects", removed)


async def _remove_deleted(parts: Housekeeping) -> None:
    while await parts.deletions.remove_due_uploads(BATCH) >= BATCH:
        pass
    await remove_listed_objects(parts.deletions, parts.images, lease=parts.settings.lease)
    await parts.accounts.finish_removals()
    await parts.weights.remove_unused()


async def sweep(images: ImageStore, jobs: JobReader, uploads: UploadRecords, settings: Settings) -> int:
    """Remove the objects that no record names; return how many.

    What the record of an ended job lists stays, with its thumbnails, and so does everything of an unfinished job and
    every upload with a record. An object without a record is removed only when its date is past retention, so that a
    service that was connected to an empty Redis by mistake deletes nothing.
    """
    removed = 0
    for owner in await images.folders(IMAGES):
        for year in await images.folders(owner):
            for month in await images.folders(year):
                for day in await images.folders(month):
                    removed += await _sweep_day(images, jobs, uploads, settings, day)
    return removed


async def _sweep_day(
    images: ImageStore, jobs: JobReader, uploads: UploadRecords, settings: Settings, folder: str
) -> int:
    """Sweep one folder, `images/<owner>/<yyyy>/<mm>/<dd>`: day by day, so that memory stays small."""
    names = await images.names(folder)
    ids = sorted({_job_id(name) for name in names})
    found, uploaded = await jobs.find_many(ids), await uploads.existing(ids)
    day = date(*(int(part) for part in folder.split("/")[-3:]))
    limit = settings.retention + 2 * settings.queue_age_limit
    is_over = datetime.now(UTC).date() - day > limit
    of_jobs = [name for name in names if _job_id(name) not in uploaded]
    orphans = [name for name in of_jobs if _is_orphan(name, found.get(_job_id(name)), is_over=is_over)]
    for name in orphans:
        await images.delete(images.uri(name))
    return len(orphans)


def _is_orphan(name: str, job: Job | None, *, is_over: bool) -> bool:
    if job is None:
        return is_over
    if not job.state.is_terminal:
        return False
    return not any(  # names are compared: the storage may have moved since the record was written
        uri.endswith(f"/{name}") for image in job.images for uri in (image.image_uri, thumbnail_uri(image.image_uri))
    )


def _job_id(name: str) -> str:
    return name.split("/")[-2]
