"""The job protocol against a model: seeded games, with 30 % of all calls made twice, and Hypothesis's own moves."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serve_app.domain.jobs import JobKind
from tests.stores.logical import Bench, model_settings
from tests.stores.world import ACCOUNTS, GROUPS, WORKERS, World, play


@pytest.mark.parametrize("seed", range(6))
async def test_every_promise_holds_over_a_game_in_which_calls_are_repeated(
    seed: int, game_url: str, tmp_path: Path
) -> None:
    bench = Bench(game_url, model_settings(tmp_path), database=1)
    await play(bench, seed)
    await bench.close()


@pytest.mark.soak
@pytest.mark.parametrize("hundred", range(10))
async def test_every_promise_holds_over_a_thousand_games(hundred: int, game_url: str, tmp_path: Path) -> None:
    for seed in range(100 + 100 * hundred, 200 + 100 * hundred):
        bench = Bench(game_url, model_settings(tmp_path), database=1)
        await play(bench, seed, moves=250)
        await bench.close()


def test_every_promise_holds_for_moves_that_hypothesis_finds(game_url: str, tmp_path: Path) -> None:
    class Game(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            bench = Bench(game_url, model_settings(tmp_path, max_queued=6, max_queued_per_account=4), database=2)
            self.world = World(bench, random.Random(0), repeat=0.3)

        @rule(account=st.sampled_from(ACCOUNTS), group=st.sampled_from(GROUPS), images=st.integers(1, 4))
        def accept(self, account: str, group: str, images: int) -> None:
            self.runner.run(self.world.accept(account=account, group=group, images=images))

        @rule(account=st.sampled_from(ACCOUNTS))
        def accept_an_upscale(self, account: str) -> None:
            self.runner.run(self.world.accept(account=account, group="", is_upscale=True))

        @rule(same_body=st.booleans())
        def accept_again(self, same_body: bool) -> None:
            self.runner.run(self.world.accept_again(same_body=same_body))

        @rule(
            worker=st.sampled_from(WORKERS),
            resident=st.lists(st.sampled_from(GROUPS), max_size=2, unique=True),
            limit=st.integers(0, 5),
            kind=st.sampled_from(JobKind),
        )
        def claim(self, worker: str, resident: list[str], limit: int, kind: JobKind) -> None:
            self.runner.run(self.world.claim(worker=worker, resident=tuple(resident), limit=limit, kind=kind))

        @precondition(lambda self: self.world.leases)
        @rule(pick=st.integers(0, 100))
        def beat(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.world.beat())

        @precondition(lambda self: self.world.leases)
        @rule(pick=st.integers(0, 100))
        def finish(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.world.finish())

        @precondition(lambda self: self.world.leases)
        @rule(pick=st.integers(0, 100), retry=st.booleans())
        def fail(self, pick: int, retry: bool) -> None:
            self._pick(pick)
            self.runner.run(self.world.fail(retry=retry))

        @precondition(lambda self: self.world.leases)
        @rule(pick=st.integers(0, 100))
        def hand_back(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.world.hand_back())

        @precondition(lambda self: self.world.jobs)
        @rule(pick=st.integers(0, 100), by_operator=st.booleans())
        def cancel(self, pick: int, by_operator: bool) -> None:
            self._pick(pick)
            self.runner.run(self.world.cancel(by_operator=by_operator))

        @precondition(lambda self: self.world.jobs)
        @rule(pick=st.integers(0, 100))
        def revive(self, pick: int) -> None:
            self._pick(pick)
            self.runner.run(self.world.revive())

        @rule()
        def reap(self) -> None:
            self.runner.run(self.world.reap())

        @rule(ms=st.sampled_from((1, 900, 3_000, 29_999, 30_000, 3_600_000)))
        def time_passes(self, ms: int) -> None:
            self.world.advance(ms)

        @invariant()
        def all_is_as_promised(self) -> None:
            self.runner.run(self.world.check())

        def teardown(self) -> None:
            self.runner.run(self.world.bench.close())
            self.runner.close()

        def _pick(self, pick: int) -> None:
            self.world.rnd = random.Random(pick)

    profile = settings(
        max_examples=15,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Game, settings=profile)
