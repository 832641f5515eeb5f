"""Housekeeping: expired leases and jobs, objects without a record, the catalog file.

A lock that expires by itself, so that one process sweeps per interval.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

from serve_app.domain.errors import AtelierError
from serve_app.domain.jobs import Job
from serve_app.jobs.deletion import remove_listed_objects
from serve_app.jobs.images import IMAGES, thumbnail_uri
from serve_app.jobs.samples import draw_sample
from serve_app.loras.applied_catalog import CatalogFollower
from serve_app.loras.stored_weights import remove_unused_weights
from serve_app.operations.account_deletion import finish_removals
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient

if TYPE_CHECKING:
    from serve_app.resources import Resources


_log = logging.getLogger(__name__)

BATCH = 100
"""Jobs moved per list and script: a few milliseconds, so that nobody waits behind the reaper."""
SWEEP_EVERY = timedelta(hours=1)
REMOVE_EVERY = timedelta(seconds=30)
"""Objects of deleted jobs that could not be removed at once, those that a worker wrote meanwhile, and accounts whose deletion was
cut short."""


async def reap_forever(
    resources: "Resources",
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
        group.create_task(_reap_loop(resources, every))
        group.create_task(_sweep_loop(resources, sweep_every))
        group.create_task(_removal_loop(resources, remove_every))
        group.create_task(_catalog_loop(resources, look_every))
        group.create_task(_sample_loop(resources, look_every))


async def _reap_loop(resources: "Resources", every: timedelta) -> None:
    while True:
        try:
            await _reap_all(resources)
        except Exception as error:  # noqa: BLE001 - the reaper must outlive any failure of a round
            _log.warning("reaping failed, trying again: %s", error)
            await _ensure_redis(resources)
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


async def _reap_all(resources: "Resources") -> None:
    moved = BATCH
    while moved >= BATCH:
        moved = await resources.queue.reap(BATCH)


async def _ensure_redis(resources: "Resources") -> None:
    try:
        await resources.ensure_redis()
    except AtelierError as error:
        _log.warning("the embedded Redis is not back yet: %s", error)


async def _sweep_loop(resources: "Resources", every: timedelta) -> None:
    while True:
        try:
            if await resources.sweep_lock.acquire(every):
                removed = await sweep(resources)
                _log.info("the sweeper removed %d objects", removed)
        except Exception as error:  # noqa: BLE001 - a storage that is down today is swept tomorrow
            _log.warning("sweeping failed, trying again in %s: %s", every, error)
        await _pause(every)


async def _catalog_loop(resources: "Resources", every: timedelta) -> None:
    follower = CatalogFollower(resources)
    while True:
        try:
            await follower.look()
        except Exception as error:  # noqa: BLE001 - the file is looked at again, whatever this failure was
            _log.warning("following the catalog file failed, trying again: %s", error)
        await _pause(every)


async def _sample_loop(resources: "Resources", every: timedelta) -> None:
    while True:
        try:
            await draw_sample(resources)
        except Exception as error:  # noqa: BLE001 - a sample is worth no more than a line
            _log.info("no sample was drawn: %s", error)
        await _pause(every)


async def _removal_loop(resources: "Resources", every: timedelta) -> None:
    while True:
        try:
            await remove_listed_objects(resources)
            await finish_removals(resources)
            await remove_unused_weights(resources)
        except Exception as error:  # noqa: BLE001 - what a storage that is down keeps today goes when it is back
            _log.warning("removing deleted objects failed, trying again in %s: %s", every, error)
        await _pause(every)


async def sweep(resources: "Resources") -> int:
    """Remove the objects that no record names; return how many.

    Of an ended job, what its record lists stays, with its thumbnails; of a job still under way, everything. An object without a record is removed
    only when its date is past retention, so that a service connected to an empty Redis by mistake deletes nothing.
    """
    removed = 0
    for owner in await resources.images.folders(IMAGES):
        for year in await resources.images.folders(owner):
            for month in await resources.images.folders(year):
                for day in await resources.images.folders(month):
                    removed += await _sweep_day(resources, day)
    return removed


async def _sweep_day(resources: "Resources", folder: str) -> int:
    """Sweep one folder, `images/<owner>/<yyyy>/<mm>/<dd>`: day by day, so that memory stays small."""
    names = await resources.images.names(folder)
    job_ids = sorted({_job_id(name) for name in names})
    jobs = await resources.jobs.find_many(job_ids)
    day = date(*(int(part) for part in folder.split("/")[-3:]))
    limit = resources.settings.retention + 2 * resources.settings.queue_age_limit
    is_over = datetime.now(UTC).date() - day > limit
    orphans = [name for name in names if _is_orphan(name, jobs.get(_job_id(name)), is_over=is_over)]
    return await _remove(resources, orphans)


def _is_orphan(name: str, job: Job | None, *, is_over: bool) -> bool:
    if job is None:
        return is_over
    if not job.state.is_terminal:
        return False
    return not any(  # by name: the storage may have moved since the record was written
        uri.endswith(f"/{name}") for image in job.images for uri in (image.image_uri, thumbnail_uri(image.image_uri))
    )


async def _remove(resources: "Resources", names: Sequence[str]) -> int:
    for name in names:
        await resources.images.delete(resources.images.uri(name))
    return len(names)


def _job_id(name: str) -> str:
    return name.split("/")[-2]


class SweepLock:
    """Held by the process that sweeps the storage. May raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def acquire(self, every: timedelta) -> bool:
        """Return True to one caller per interval."""
        return bool(await self._redis.set(redis_key("sweep_lock"), "1", nx=True, px=every))
