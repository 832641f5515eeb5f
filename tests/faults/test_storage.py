"""Under a failing storage a job is completed only with the object that its record names."""

from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from serve_app.domain.jobs import JobState
from serve_app.store.keys import redis_key
from tests.faults.environment import HASTY, Environment, open_environment
from tests.faults.storage import ERROR, FLIP, FULL, SLOW, TRUNCATE, set_fault
from tests.faults.worker import FORKED_WORKERS, WorkerBehavior
from tests.support import wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]
soak = partial(pytest.param, marks=pytest.mark.soak)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
async def stored(tmp_path: Path, bucket: Path) -> AsyncIterator[Environment]:
    """A env whose images lie in a bucket that fails on command."""
    (bucket / "images").mkdir(parents=True)
    async with open_environment(tmp_path, storage_url=f"faulty://{bucket}", lease=HASTY) as env:
        yield env


@pytest.mark.parametrize("fault", [soak(ERROR), soak(FULL), TRUNCATE])
async def test_a_storage_that_fails_or_keeps_half_delays_a_job_and_does_not_lose_it(
    stored: Environment, bucket: Path, fault: str
) -> None:
    set_fault(bucket, fault)
    job_id = await stored.accept()
    stored.worker(WorkerBehavior(reaps=True))
    await stored.until_counted("requeued")
    assert (await stored.job(job_id)).state is not JobState.COMPLETED, "half an image was committed"
    set_fault(bucket, None)
    await stored.ends_well()


@pytest.mark.soak
async def test_a_storage_that_stays_down_ends_the_job_as_failed(tmp_path: Path, bucket: Path) -> None:
    (bucket / "images").mkdir(parents=True)
    changes = {"storage_url": f"faulty://{bucket}", "lease": timedelta(seconds=0.5), "max_attempts": 2}
    async with open_environment(tmp_path, **changes) as env:
        set_fault(bucket, ERROR)
        job_id = await env.accept(may_end_as=[JobState.FAILED])
        env.worker(WorkerBehavior(reaps=True))
        await env.until_ended()
        assert "stored" in (await env.failure(job_id)).message
        assert not await env.audit()


@pytest.mark.soak
async def test_a_slow_storage_costs_no_attempt(stored: Environment, bucket: Path) -> None:
    set_fault(bucket, SLOW)
    slow = await stored.accept()
    stored.worker(WorkerBehavior(reaps=True))
    await stored.until_running(slow)
    lease_ends = await _lease_ends(stored, slow)

    async def has_outlived_its_lease() -> bool:
        return await _lease_ends(stored, slow) > lease_ends + 2 * stored.settings.lease.total_seconds()

    await wait_until(has_outlived_its_lease, timeout=60)
    set_fault(bucket, None)
    await stored.ends_well()
    assert (await stored.job(slow)).attempt == 1


async def _lease_ends(env: Environment, job_id: str) -> float:
    with env.redis() as client:
        ends = client.zscore(redis_key("lease", "generation"), job_id)
    assert ends, "it has lost its lease"
    return ends / 1000


async def test_the_auditor_finds_a_storage_that_lies(stored: Environment, bucket: Path) -> None:
    set_fault(bucket, FLIP)
    await stored.accept()
    stored.worker(WorkerBehavior(reaps=True))
    await stored.until_ended()
    assert any("is not what was committed" in problem for problem in await stored.audit())


@pytest.mark.soak
async def test_the_auditor_finds_an_object_that_is_gone(stored: Environment) -> None:
    await stored.accept()
    stored.worker(WorkerBehavior(reaps=True))
    await stored.until_ended()
    (uri,) = [image.image_uri for image in (await stored.job(stored.acknowledged.all[0])).images]
    await stored.resources.images.delete(uri)
    assert any("its object is gone" in problem for problem in await stored.audit())
