"""The job protocol matches a model, in seeded runs and in moves that Hypothesis chooses.

30 % of all calls are made twice.
"""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serve_app.domain.jobs import JobKind
from tests.jobs.job_model import ACCOUNTS, GROUPS, WORKERS, JobModel, run_model
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
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            queue = LogicalQueue(
                redis_url, model_settings(tmp_path, max_queued=6, max_queued_per_account=4), database=2
            )
            self.model = JobModel(queue, random.Random(0), repeat=0.3)

        @rule(account=st.sampled_from(ACCOUNTS), group=st.sampled_from(GROUPS), images=st.integers(1, 4))
        def accept(self, account: str, group: str, images: int) -> None:
            self.runner.run(self.model.accept(account=account, group=group, images=images))

        @rule(account=st.sampled_from(ACCOUNTS))
        def accept_an_upscale(self, account: str) -> None:
            self.runner.run(self.model.accept(account=account, group="", is_upscale=True))

        @rule(same_body=st.booleans())
        def accept_again(self, same_body: bool) -> None:
            self.runner.run(self.model.accept_again(same_body=same_body))

        @rule(
            worker=st.sampled_from(WORKERS),
            resident=st.lists(st.sampled_from(GROUPS), max_size=2, unique=True),
            limit=st.integers(0, 5),
            kind=st.sampled_from(JobKind),
        )
        def claim(self, worker: str, resident: list[str], limit: int, kind: JobKind) -> None:
            self.runner.run(self.model.claim(worker=worker, resident=tuple(resident), limit=limit, kind=kind))

        @precondition(lambda self: self.model.leases)
        @rule(pick=st.integers(0, 100))
        def heartbeat(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.model.heartbeat())

        @precondition(lambda self: self.model.leases)
        @rule(pick=st.integers(0, 100))
        def finish(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.model.finish())

        @precondition(lambda self: self.model.leases)
        @rule(pick=st.integers(0, 100), retry=st.booleans())
        def fail(self, pick: int, retry: bool) -> None:
            self._pick(pick)
            self.runner.run(self.model.fail(retry=retry))

        @precondition(lambda self: self.model.leases)
        @rule(pick=st.integers(0, 100))
        def release(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.model.release())

        @precondition(lambda self: self.model.jobs)
        @rule(pick=st.integers(0, 100), by_operator=st.booleans())
        def cancel(self, pick: int, by_operator: bool) -> None:
            self._pick(pick)
            self.runner.run(self.model.cancel(by_operator=by_operator))

        @precondition(lambda self: self.model.jobs)
        @rule(pick=st.integers(0, 100))
        def requeue_dead(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.model.requeue_dead())

        @rule(account=st.sampled_from(ACCOUNTS), group=st.sampled_from(GROUPS), allow=st.booleans())
        def decide(self, account: str, group: str, allow: bool) -> None:
            self.runner.run(self.model.decide(account=account, group=group, allow=allow))

        @rule()
        def reap(self) -> None:
            self.runner.run(self.model.reap())

        @rule(ms=st.sampled_from((1, 900, 3_000, 29_999, 30_000, 3_600_000)))
        def time_passes(self, ms: int) -> None:
            self.model.advance(ms)

        @invariant()
        def all_is_as_promised(self) -> None:
            self.runner.run(self.model.check())

        def teardown(self) -> None:
            self.runner.run(self.model.queue.close())
            self.runner.close()

        def _pick(self, pick: int) -> None:
            self.model.rnd = random.Random(pick)

    profile = settings(
        max_examples=15,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Machine, settings=profile)
