"""A storage that fails, fills, stalls or lies: a job is completed only with the object that its record names."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from serve_app.domain.jobs import JobState
from tests.faults.scene import HASTY, Scene, open_scene
from tests.faults.storage import ERROR, FLIP, FULL, SLOW, TRUNCATE, set_fault
from tests.faults.worker import Orders
from tests.support import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
async def stored(tmp_path: Path, bucket: Path) -> AsyncIterator[Scene]:
    """A scene whose images lie in a bucket that fails on command."""
    (bucket / "images").mkdir(parents=True)
    async with open_scene(tmp_path, storage_url=f"faulty://{bucket}", lease=HASTY) as scene:
        yield scene


@pytest.mark.soak
@pytest.mark.parametrize("fault", [ERROR, FULL])
async def test_a_storage_that_fails_delays_a_job_and_does_not_lose_it(stored: Scene, bucket: Path, fault: str) -> None:
    set_fault(bucket, fault)
    job_id = await stored.accept()
    stored.worker(Orders(reaps=True))

    async def was_given_up() -> bool:
        return (await stored.resources.jobs.counts()).get("requeued", 0) > 0

    await wait_until(was_given_up, timeout=60)
    assert (await stored.job(job_id)).state is not JobState.COMPLETED
    set_fault(bucket, None)
    await stored.until_ended()
    assert not await stored.audit()


@pytest.mark.soak
async def test_a_storage_that_stays_down_ends_the_job_as_failed(tmp_path: Path, bucket: Path) -> None:
    (bucket / "images").mkdir(parents=True)
    changes = {"storage_url": f"faulty://{bucket}", "lease": timedelta(seconds=0.5), "max_attempts": 2}
    async with open_scene(tmp_path, **changes) as scene:
        set_fault(bucket, ERROR)
        job_id = await scene.accept(may_end_as=[JobState.FAILED])
        scene.worker(Orders(reaps=True))
        await scene.until_ended()
        failure = (await scene.job(job_id)).failure
        assert failure is not None
        assert "stored" in failure.message
        assert not await scene.audit()


@pytest.mark.soak
async def test_a_slow_storage_costs_no_attempt(stored: Scene, bucket: Path) -> None:
    set_fault(bucket, SLOW)
    slow = await stored.accept()
    stored.worker(Orders(reaps=True))
    await stored.until_running(slow)
    lease_ends = await _lease_ends(stored, slow)

    async def has_outlived_its_lease() -> bool:
        return await _lease_ends(stored, slow) > lease_ends + 2 * stored.settings.lease.total_seconds()

    await wait_until(has_outlived_its_lease, timeout=60)
    set_fault(bucket, None)
    await stored.until_ended()
    assert (await stored.job(slow)).attempt == 1
    assert not await stored.audit()


async def _lease_ends(scene: Scene, job_id: str) -> float:
    with scene.redis() as client:
        ends = client.zscore("{job:0}:lease:generation", job_id)
    assert isinstance(ends, float), "it has lost its lease"
    return ends / 1000


async def test_a_truncated_object_is_never_committed(stored: Scene, bucket: Path) -> None:
    set_fault(bucket, TRUNCATE)
    job_id = await stored.accept()
    stored.worker(Orders(reaps=True))

    async def was_given_up() -> bool:
        job = await stored.job(job_id)
        assert job.state is not JobState.COMPLETED, "half an image was committed"
        return (await stored.resources.jobs.counts()).get("requeued", 0) > 0

    await wait_until(was_given_up, timeout=60)
    set_fault(bucket, None)
    await stored.until_ended()
    assert not await stored.audit()


async def test_the_auditor_finds_a_storage_that_lies(stored: Scene, bucket: Path) -> None:
    set_fault(bucket, FLIP)
    await stored.accept()
    stored.worker(Orders(reaps=True))
    await stored.until_ended()
    assert any("is not what was committed" in problem for problem in await stored.audit())


@pytest.mark.soak
async def test_the_auditor_finds_an_object_that_is_gone(stored: Scene) -> None:
    await stored.accept()
    stored.worker(Orders(reaps=True))
    await stored.until_ended()
    (uri,) = [image.image_uri for image in (await stored.job(stored.ledger.all[0])).images]
    await stored.resources.images.delete(uri)
    assert any("its object is gone" in problem for problem in await stored.audit())
