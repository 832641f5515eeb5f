"""Housekeeping: leases, waits, orphaned objects, and a Redis that comes back."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from serve_app.domain.audit import Actor
from serve_app.domain.jobs import JobState
from serve_app.jobs.deletion import remove_listed_objects
from serve_app.jobs.images import thumbnail_uri
from serve_app.operations.housekeeping import reap_forever, sweep
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from tests.composition import Resources, open_resources
from tests.made_jobs import accept, claim, complete, job_of, put, stored_image
from tests.store.redis_servers import append_only_file, damaged
from tests.support import wait_until, write_catalog

OFTEN = timedelta(milliseconds=20)


@asynccontextmanager
async def _reaping(resources: Resources) -> AsyncGenerator[asyncio.Task[None]]:
    task = asyncio.create_task(
        reap_forever(resources.for_housekeeping, every=OFTEN, sweep_every=OFTEN, remove_every=OFTEN)
    )
    try:
        yield task
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_lost_worker_loses_its_job_and_a_long_wait_ends(settings: Settings, resources: Resources) -> None:
    changes = {"lease": timedelta(milliseconds=30)}
    async with open_resources(settings.model_copy(update=changes)) as quick, _reaping(quick):
        job_id = await accept(quick)
        assert await claim(quick)
        await wait_until(lambda: _is(quick, job_id, JobState.QUEUED))
    changes = {"queue_age_limit": timedelta(milliseconds=1)}
    async with open_resources(settings.model_copy(update=changes)) as strict, _reaping(strict):
        await wait_until(lambda: _is(strict, job_id, JobState.EXPIRED))


async def _is(resources: Resources, job_id: str, state: JobState) -> bool:
    return (await job_of(resources, job_id)).state is state


@pytest.mark.slow
async def test_more_than_one_batch_is_reaped_at_once(settings: Settings, resources: Resources) -> None:
    changes = {"queue_age_limit": timedelta(milliseconds=1)}
    async with open_resources(settings.model_copy(update=changes)) as quick:
        job_ids = [await accept(quick) for _ in range(230)]
        async with _reaping(quick):
            for job_id in job_ids:
                await wait_until(lambda job_id=job_id: _is(quick, job_id, JobState.EXPIRED))


@pytest.mark.slow
async def test_the_reaper_outlives_a_dead_redis_and_brings_the_embedded_one_back(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "var", redis_url="", catalog=write_catalog(tmp_path))
    try:
        async with open_resources(settings) as resources, _reaping(resources) as reaping:
            job_id = await accept(resources)
            for _ in range(2):
                os.kill(ensure_redis(settings.data_dir).pid, signal.SIGKILL)
                await wait_until(lambda: _is(resources, job_id, JobState.QUEUED))
            assert not reaping.done()
    finally:
        stop_redis(settings.data_dir)


@pytest.mark.slow
async def test_the_reaper_outlives_an_embedded_redis_that_cannot_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path / "var", redis_url="", catalog=write_catalog(tmp_path))
    try:
        async with open_resources(settings) as resources:
            job_id = await accept(resources)
            stop_redis(settings.data_dir)
            async with _reaping(resources) as reaping:
                with damaged(append_only_file(settings.data_dir)):
                    await wait_until(lambda: "reaping failed" in caplog.text, timeout=60)
                await wait_until(lambda: _is(resources, job_id, JobState.QUEUED), timeout=60)
                assert not reaping.done()
    finally:
        stop_redis(settings.data_dir)


@pytest.mark.slow
async def test_no_redis_is_started_in_place_of_one_that_the_settings_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = ensure_redis(tmp_path / "named")
    settings = Settings(data_dir=tmp_path / "var", redis_url=named.url, catalog=write_catalog(tmp_path))
    async with open_resources(settings) as resources, _reaping(resources):
        stop_redis(tmp_path / "named")
        await wait_until(lambda: "reaping failed" in caplog.text, timeout=60)
    assert not (settings.data_dir / "redis").exists()


@pytest.mark.slow
async def test_it_ends_whenever_it_is_canceled(resources: Resources) -> None:
    """It is canceled after any number of turns of the loop, also where the Redis client swallows the cancel."""
    for turns in range(60):
        reaping = asyncio.create_task(reap_forever(resources.for_housekeeping, every=OFTEN))
        for _ in range(turns):
            await asyncio.sleep(0)
        reaping.cancel()
        ended, _ = await asyncio.wait({reaping}, timeout=20)
        assert ended, f"canceled after {turns} turns, and still there"


OLD, TODAY = datetime.now(UTC) - timedelta(days=40), datetime.now(UTC)


async def test_the_sweeper_keeps_what_records_name_and_removes_the_rest(resources: Resources) -> None:
    running, done = await accept(resources), await accept(resources)
    leases = {each.lease.job_id: each.lease for each in await claim(resources, limit=2)}
    kept = await put(resources, done, when=TODAY)
    zombie = await put(resources, done, attempt=2, when=TODAY)
    under_way = await put(resources, running, when=TODAY)
    unknown_today = await put(resources, "gen_unknown", when=TODAY)
    unknown_old = await put(resources, "gen_ancient", when=OLD)
    image_id = "img_" + "a" * 26
    uploaded = await put(resources, image_id, when=OLD)
    await resources.uploaded.add(
        replace(stored_image(uploaded), image_id=image_id),
        account=(await resources.accounts.create("acme")).id,
        user="kept by the test",
        lasts=timedelta(days=1),
    )
    before_the_move = f"s3://elsewhere/{resources.images.name(kept)}"
    await resources.queue.finish(leases[done], [stored_image(before_the_move)], seconds=1)
    kept_thumbnail, orphan = thumbnail_uri(kept), thumbnail_uri(zombie)
    for uri in (kept_thumbnail, orphan):
        await resources.images.put(resources.images.name(uri), b"webp")
    assert await sweep(resources.images, resources.jobs, resources.uploaded, resources.settings) == 3
    objects = (uploaded, kept, kept_thumbnail, under_way, unknown_today, zombie, orphan, unknown_old)
    assert [uri for uri in objects if await resources.images.exists(uri)] == [*objects[:5]]
    assert await sweep(resources.images, resources.jobs, resources.uploaded, resources.settings) == 0


async def test_one_process_sweeps_per_interval(resources: Resources) -> None:
    turns = await asyncio.gather(*(resources.for_housekeeping.may_sweep(timedelta(seconds=60)) for _ in range(8)))
    assert turns.count(True) == 1


@contextmanager
def _storage_down(resources: Resources) -> Generator[None]:
    images, aside = resources.settings.data_dir / "images", resources.settings.data_dir / "aside"
    images.rename(aside)
    images.write_text("a file where the folder should be")
    yield
    images.unlink()
    aside.rename(images)


async def _is_gone(resources: Resources, uri: str) -> bool:
    return not await resources.images.exists(uri)


async def test_the_sweeper_outlives_a_storage_that_is_down(
    resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    old = await put(resources, "gen_ancient", when=OLD)
    async with _reaping(resources):
        with _storage_down(resources):
            await wait_until(lambda: "sweeping failed, trying again" in caplog.text)
        await wait_until(lambda: _is_gone(resources, old))


async def test_objects_of_a_job_whose_deletion_was_cut_short_are_removed(
    settings: Settings, resources: Resources
) -> None:
    """The process died after the record was gone: only the list still names the objects."""
    async with open_resources(settings.model_copy(update={"lease": timedelta(milliseconds=30)})) as quick:
        job_id, (image,) = await complete(quick)
        uri = image.image_uri
        assert await quick.deletions.delete_job(job_id, account_id="acct_a")
        assert await quick.images.exists(uri)
        async with _reaping(quick):
            await wait_until(lambda: _is_forgotten(quick))
        assert not await quick.images.exists(uri)


@pytest.mark.slow
async def test_what_a_worker_writes_after_the_deletion_is_removed_too(settings: Settings, resources: Resources) -> None:
    async with open_resources(settings.model_copy(update={"lease": timedelta(seconds=0.5)})) as quick:
        job_id, (image,) = await complete(quick)
        uri = image.image_uri
        await quick.for_jobs.deletion.delete_job(job_id, account_id="acct_a", by=Actor("tests"))
        assert not await quick.images.exists(uri)
        await remove_listed_objects(quick.deletions, quick.images, lease=timedelta(hours=1))  # nothing is there yet
        assert await quick.images.put(quick.images.name(uri), b"late") == uri
        async with _reaping(quick):
            await wait_until(lambda: _is_forgotten(quick))
        assert not await quick.images.exists(uri)


async def test_a_job_whose_image_lies_in_a_storage_of_others_is_deleted(resources: Resources) -> None:
    job_id = await accept(resources)
    [claimed] = await claim(resources)
    await resources.queue.finish(claimed.lease, [stored_image("gs://elsewhere/1.png")], seconds=1)
    await resources.for_jobs.deletion.delete_job(job_id, account_id="acct_a", by=Actor("tests"))
    assert await resources.jobs.find(job_id) is None


@pytest.mark.slow
async def test_a_deletion_waits_for_a_storage_that_is_down(
    resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    job_id, (image,) = await complete(resources)
    with _storage_down(resources):
        await resources.for_jobs.deletion.delete_job(job_id, account_id="acct_a", by=Actor("tests"))
        assert await resources.jobs.find(job_id) is None
        async with _reaping(resources):
            await wait_until(lambda: "removing deleted objects failed, trying again" in caplog.text)
    async with _reaping(resources):
        await wait_until(lambda: _is_gone(resources, image.image_uri))


async def _is_forgotten(resources: Resources) -> bool:
    return not await resources.deletions.listed()
