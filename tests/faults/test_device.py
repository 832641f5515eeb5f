"""A device too small for a batch or for a job, lost, or overflowing: what can be drawn is drawn, the rest fails by name."""

from pathlib import Path

import pytest

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import JobState
from tests.faults.scene import Scene, open_scene
from tests.faults.worker import OUT_OF_MEMORY, UNHEALTHY, Orders
from tests.support import wait_until

pytestmark = pytest.mark.timeout(300)


async def test_jobs_that_do_not_fit_together_are_drawn_in_smaller_batches(scene: Scene) -> None:
    ids = [await scene.accept(seed=seed) for seed in range(4)]
    scene.worker(Orders(device_rows=4))
    await scene.until_ended()
    assert (scene.settings.data_dir / OUT_OF_MEMORY).exists(), "they were never tried together"
    assert [(await scene.job(job_id)).attempt for job_id in ids] == [1] * 4
    assert not await scene.audit()


async def test_a_job_that_fits_no_device_fails_by_name_and_alone(tmp_path: Path) -> None:
    async with open_scene(tmp_path, max_attempts=2) as scene:
        large = await scene.accept(size=512, may_end_as=[JobState.FAILED])
        for seed in range(3):
            await scene.accept(seed=seed)
        scene.worker(Orders(device_rows=4))
        await scene.until_ended()
        failure = (await scene.job(large)).failure
        assert failure is not None
        assert failure.code is FailureCode.OUT_OF_MEMORY
        assert not await scene.audit()


async def test_a_lost_device_costs_its_process_and_no_job(scene: Scene) -> None:
    for seed in range(3):
        await scene.accept(seed=seed)
    lost = scene.worker(Orders(is_device_lost=True))
    await wait_until(lambda: lost.exitcode == UNHEALTHY, timeout=60)
    scene.worker()
    await scene.until_ended()
    assert not await scene.audit()


async def test_an_image_that_is_no_numbers_is_not_stored_as_a_black_one(scene: Scene) -> None:
    job_id = await scene.accept(may_end_as=[JobState.FAILED])
    scene.worker(Orders(is_blind=True, reaps=True))
    await scene.until_ended()
    failure = (await scene.job(job_id)).failure
    assert failure is not None
    assert failure.code is FailureCode.GENERATION_FAILED
    assert "not finite" in failure.message
    assert not scene.images
    assert not await scene.audit()
