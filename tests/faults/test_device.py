"""On a device that is too small, lost or overflowing, some jobs are drawn and the rest fail by name."""

from pathlib import Path

import pytest

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import JobState
from tests.faults.environment import Environment, open_environment
from tests.faults.worker import FORKED_WORKERS, OUT_OF_MEMORY, UNHEALTHY, WorkerBehavior
from tests.support import wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]


async def test_jobs_that_do_not_fit_together_are_drawn_in_smaller_batches(env: Environment) -> None:
    ids = [await env.accept(seed=seed) for seed in range(4)]
    env.worker(WorkerBehavior(device_rows=4))
    await env.ends_well()
    assert (env.settings.data_dir / OUT_OF_MEMORY).exists(), "they were never tried together"
    assert [(await env.job(job_id)).attempt for job_id in ids] == [1] * 4


async def test_a_job_that_fits_no_device_fails_by_name_and_alone(tmp_path: Path) -> None:
    async with open_environment(tmp_path, max_attempts=2) as env:
        large = await env.accept(size=512, may_end_as=[JobState.FAILED])
        for seed in range(3):
            await env.accept(seed=seed)
        env.worker(WorkerBehavior(device_rows=4))
        await env.ends_well()
        assert (await env.failure(large)).code is FailureCode.OUT_OF_MEMORY


async def test_a_lost_device_costs_its_process_and_no_job(env: Environment) -> None:
    for seed in range(3):
        await env.accept(seed=seed)
    lost = env.worker(WorkerBehavior(is_device_lost=True))
    await wait_until(lambda: lost.exitcode == UNHEALTHY, timeout=60)
    env.worker()
    await env.ends_well()


async def test_an_image_that_is_no_numbers_is_not_stored_as_a_black_one(env: Environment) -> None:
    job_id = await env.accept(may_end_as=[JobState.FAILED])
    env.worker(WorkerBehavior(decodes_nan=True, reaps=True))
    await env.until_ended()
    failure = await env.failure(job_id)
    assert failure.code is FailureCode.GENERATION_FAILED
    assert "not finite" in failure.message
    assert not env.images
    assert not await env.audit()
