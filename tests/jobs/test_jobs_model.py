"""The job protocol matches a model, in seeded runs and in moves that Hypothesis chooses.

30 % of all calls are made twice.
"""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jobs.job_model import JobModel, random_move, run_model
from tests.jobs.logical_queue import LogicalQueue, model_settings
from tests.store.redis_servers import of_oldest_redis
from tests.support import volatile_redis


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_every_promise_holds_over_a_run_in_which_calls_are_repeated(
    seed: int, redis_url: str, tmp_path: Path
) -> None:
    queue = LogicalQueue(redis_url, model_settings(tmp_path), database=1)
    await run_model(queue, seed)
    await queue.close()


@pytest.mark.slow
async def test_every_promise_holds_on_the_oldest_server_that_is_taken(tmp_path: Path) -> None:
    with volatile_redis(of_oldest_redis("redis-server")) as url:
        queue = LogicalQueue(url, model_settings(tmp_path), database=1)
        await run_model(queue, seed=6)
        await queue.close()


@pytest.mark.soak
@pytest.mark.parametrize("hundred", range(10))
async def test_every_promise_holds_over_a_thousand_runs(hundred: int, redis_url: str, tmp_path: Path) -> None:
    for seed in range(100 + 100 * hundred, 200 + 100 * hundred):
        queue = LogicalQueue(redis_url, model_settings(tmp_path), database=1)
        await run_model(queue, seed, moves=250)
        await queue.close()


@pytest.mark.slow
def test_every_promise_holds_for_moves_that_hypothesis_finds(redis_url: str, tmp_path: Path) -> None:
    async def make_moves(rnd: random.Random) -> None:
        limits = model_settings(tmp_path, max_queued=6, max_queued_per_account=4)
        queue = LogicalQueue(redis_url, limits, database=2)
        model = JobModel(queue, rnd)
        for _ in range(30):
            await random_move(model)
            await model.check()
        await queue.close()

    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(rnd=st.randoms(use_true_random=False))
    def run(rnd: random.Random) -> None:
        asyncio.run(make_moves(rnd))

    run()
