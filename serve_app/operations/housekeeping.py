"""Housekeeping: expired leases and jobs, objects without a record, the catalog file.

A lock that expires by itself, so that one process sweeps per interval.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from serve_app.accounts.accounts import AccountStore
from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Job
from serve_app.jobs.deletion import Deletions, remove_listed_objects
from serve_app.jobs.history import JobReader
from serve_app.jobs.images import IMAGES, ImageStore, thumbnail_uri
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.samples import LoraSamples, SampleDrawing
from serve_app.loras.applied_catalog import AppliedCatalog, CatalogFollower
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.registration import UploadPlaces
from serve_app.loras.stored_weights import LoraFiles, LoraWeights
from serve_app.loras.weights import WeightStore
from serve_app.operations.account_deletion import account_deletion
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.keys import redis_key
from serve_app.store.measures import MemoryReserve
from serve_app.store.process import Process
from serve_app.store.redis_client import RedisClient
from serve_app.store.storage import DiskReserve, Space

_log = logging.getLogger(__name__)

BATCH = 100
"""Jobs moved per list and script: a few milliseconds, so that nobody waits behind the reaper."""
SWEEP_EVERY = timedelta(hours=1)
REMOVE_EVERY = timedelta(seconds=30)
"""Objects of deleted jobs that could not be removed at once, those that a worker wrote meanwhile, and accounts whose deletion was
cut short."""


class SweepLock:
    """Held by the process that sweeps the storage. May raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def acquire(self, every: timedelta) -> bool:
        """Return True to one caller per interval."""
        return bool(await self._redis.set(redis_key("sweep_lock"), "1", nx=True, px=every))


class Housekeeping:
    """What the housekeeper's loops work with."""

    def __init__(self, process: Process) -> None:
        """Compose the parts. Raises `BadModeration`."""
        redis, settings = process.redis, process.settings
        self.settings = settings
        self.queue = JobQueue(redis, settings)
        self.jobs = JobReader(redis)
        self.images = ImageStore(settings, process.measures)
        self.deletions = Deletions(redis, self.images)
        self.accounts = account_deletion(process, self.images)
        self.weights = LoraWeights(redis, LoraFiles(settings))
        self.catalog = AppliedCatalog(redis, settings)
        self.uploads = UploadPlaces(settings.data_dir)
        make_space = WeightStore(settings).make_space
        self.samples = SampleDrawing(
            settings=settings,
            waiting=LoraSamples(redis),
            catalog=CatalogReader(redis),
            accounts=AccountStore(redis, settings),
            queue=self.queue,
            space=Space(
                DiskReserve(settings, self.images.local_folder, self.uploads.sweep, make_space), MemoryReserve(redis)
            ),
            moderation=Moderation(settings),
        )
        self.sweep_lock = SweepLock(redis)


async def reap_forever(
    parts: Housekeeping,
    *,
    every: timedelta = timedelta(seconds=1),
    sweep_every: timedelta = SWEEP_EVERY,
    look_every: timedelta = timedelta(seconds=1),
    remove_every: timedelta = REMOVE_EVERY,
) -> None:
    """Reap, sweep, follow the catalog file and draw samples until cancelled, through any outage.

    It also restarts the embedded Redis. Any number of processes may run it.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(_reap_loop(parts.queue, parts.settings, every))
        group.create_task(_sweep_loop(parts, sweep_every))
        group.create_task(_removal_loop(parts, remove_every))
        group.create_task(_catalog_loop(CatalogFollower(parts.catalog, parts.settings.catalog), look_every))
        group.create_task(_sample_loop(parts.samples, look_every))


async def _reap_loop(queue: JobQueue, settings: Settings, every: timedelta) -> None:
    while True:
        try:
            await _reap_all(queue)
        except Exception as error:  # noqa: BLE001 - the reaper must outlive any failure of a round
            _log.warning("reaping failed, trying again: %s", error)
            await _ensure_redis(settings)
        await _pause(every)


async def _pause(length: timedelta) -> None:
    """Sleep between two rounds, unless the task was cancelled in the last.

    A cancel may be lost in the Redis client: `asyncio.wait_for` swallows one that coincides with its end (CPython issue
    86296).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await asyncio.sleep(length.total_seconds())


async def _reap_all(queue: JobQueue) -> None:
    moved = BATCH
    while moved >= BATCH:
        moved = await queue.reap(BATCH)


async def _ensure_redis(settings: Settings) -> None:
    """Start the embedded Redis if it is not running; never a server that the settings name."""
    if settings.redis_url:
        return
    try:
        await asyncio.to_thread(ensure_redis, settings.data_dir)
    except AtelierError as error:
        _log.warning("the embedded Redis is not back yet: %s", error)


async def _sweep_loop(parts: Housekeeping, every: timedelta) -> None:
    while True:
        try:
            if await parts.sweep_lock.acquire(every):
                removed = await sweep(parts.images, parts.jobs, parts.settings)
                _log.info("the sweeper removed %d objects", removed)
        except Exception as error:  # noqa: BLE001 - a storage that is down today is swept tomorrow
            _log.warning("sweeping failed, trying again in %s: %s", every, error)
        await _pause(every)


async def _catalog_loop(follower: CatalogFollower, every: timedelta) -> None:
    while True:
        try:
            await follower.look()
        except Exception as error:  # noqa: BLE001 - the file is looked at again, whatever this failure was
            _log.warning("following the catalog file failed, trying again: %s", error)
        await _pause(every)


async def _sample_loop(samples: SampleDrawing, every: timedelta) -> None:
    while True:
        try:
            await samples.draw_next()
        except Exception as error:  # noqa: BLE001 - a sample is worth no more than a line
            _log.info("no sample was drawn: %s", error)
        await _pause(every)


async def _removal_loop(parts: Housekeeping, every: timedelta) -> None:
    while True:
        try:
            await remove_listed_objects(parts.deletions, parts.images, lease=parts.settings.lease)
            await parts.accounts.finish_removals()
            await parts.weights.remove_unused()
        except Exception as error:  # noqa: BLE001 - what a storage that is down keeps today goes when it is back
            _log.warning("removing deleted objects failed, trying again in %s: %s", every, error)
        await _pause(every)


async def sweep(images: ImageStore, jobs: JobReader, settings: Settings) -> int:
    """Remove the objects that no record names; return how many.

    Of an ended job, what its record lists stays, with its thumbnails; of a job still under way, everything. An object without a record is removed
    only when its date is past retention, so that a service connected to an empty Redis by mistake deletes nothing.
    """
    removed = 0
    for owner in await images.folders(IMAGES):
        for year in await images.folders(owner):
            for month in await images.folders(year):
                for day in await images.folders(month):
                    removed += await _sweep_day(images, jobs, settings, day)
    return removed


async def _sweep_day(images: ImageStore, jobs: JobReader, settings: Settings, folder: str) -> int:
    """Sweep one folder, `images/<owner>/<yyyy>/<mm>/<dd>`: day by day, so that memory stays small."""
    names = await images.names(folder)
    job_ids = sorted({_job_id(name) for name in names})
    found = await jobs.find_many(job_ids)
    day = date(*(int(part) for part in folder.split("/")[-3:]))
    limit = settings.retention + 2 * settings.queue_age_limit
    is_over = datetime.now(UTC).date() - day > limit
    orphans = [name for name in names if _is_orphan(name, found.get(_job_id(name)), is_over=is_over)]
    return await _remove(images, orphans)


def _is_orphan(name: str, job: Job | None, *, is_over: bool) -> bool:
    if job is None:
        return is_over
    if not job.state.is_terminal:
        return False
    return not any(  # by name: the storage may have moved since the record was written
        uri.endswith(f"/{name}") for image in job.images for uri in (image.image_uri, thumbnail_uri(image.image_uri))
    )


async def _remove(images: ImageStore, names: Sequence[str]) -> int:
    for name in names:
        await images.delete(images.uri(name))
    return len(names)


def _job_id(name: str) -> str:
    return name.split("/")[-2]
