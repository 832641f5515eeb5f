"""The autoscaling policy: replicas by backlog, and its behaviour when the backlog cannot be read."""

import threading
import time
from itertools import accumulate
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.scaling import AHEAD, ArrivalRate, BacklogPolicy, wanted_replicas
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import DEFAULT_GROUP, Backlog, JobKind, pool_of
from tests.composition import Resources
from tests.made_jobs import accept
from tests.support import wait_until


def backlog(*, busy: float = 0.5, **numbers: float) -> Backlog:
    none = dict.fromkeys(("ready", "leased", "delayed", "ready_seconds", "seconds", "oldest_age_s", "accepted"), 0)
    facts: dict[str, Any] = {**none, **numbers}
    return Backlog(busy_seconds_per_unit=busy, **facts)


def context(replicas: int) -> Any:
    return SimpleNamespace(target_num_replicas=replicas)


def yes(pool: str) -> bool:
    """Says that one has run in this Ray cluster."""
    return True


def test_jobs_of_minutes_ago_keep_no_replica() -> None:
    """Without work, `downscale_to_zero_delay_s` alone says how long the last replica stays."""
    rate = _rate(0, 60, 60, 60).units_per_second
    for demand in (None, 0.0, rate):
        assert wanted_replicas(backlog(), demand, 30) == 0
    assert wanted_replicas(backlog(leased=1), rate, 30) == 1
    assert wanted_replicas(backlog(busy=8), rate, 30) == 3, "more than one is needed: a pause between two jobs"


def test_what_arrives_keeps_its_replicas_while_nothing_waits() -> None:
    assert wanted_replicas(backlog(leased=9, seconds=20), 8.2, 60) == 5


def test_spare_replicas_do_not_justify_themselves() -> None:
    """Half empty forward passes make each image slower: the backlog in seconds grows, the replicas wanted do not."""
    assert wanted_replicas(backlog(leased=9, seconds=400), 8.2, 60) == 5


def test_work_that_waits_adds_replicas_to_those_of_what_arrives() -> None:
    assert wanted_replicas(backlog(ready=50, seconds=900, ready_seconds=190), 8.0, 60) == 4 + 4


def _rate(*accepted: float, every_s: float = 60) -> ArrivalRate:
    rate = ArrivalRate()
    for number, units in enumerate(accepted):
        rate.add(1000 + number * every_s, units)
    return rate


@pytest.mark.parametrize(
    ("accepted", "every_s", "rate"),
    [
        ((70, 100), 30, None),
        ((70, 100, 130), 30, 1.0),
        ((0, 60, 120, 180, 6_000, 6_060), 60, 1.1),
        ((0, 0, 0, 0, 600, 600, 600), 60, 600 / 360),
        ((*range(0, 600, 60), *range(600, 2_401, 180)), 60, 3.0),
        ((500, 560, 620, 0), 60, None),
        ((500, 560, 0, 120), 60, 2.0),
    ],
    ids=["no minute yet", "a minute", "a burst", "rare jobs", "a change", "another Redis", "a minute of another Redis"],
)
def test_demand_is_the_rate_of_the_last_minutes(accepted: tuple[int, ...], every_s: float, rate: float | None) -> None:
    assert _rate(*accepted, every_s=every_s).units_per_second == (rate and pytest.approx(rate))


def _minutes(*rates: float) -> ArrivalRate:
    return _rate(*accumulate((60 * rate for rate in rates), initial=0))


def test_a_steady_trend_is_continued_until_a_replica_that_starts_now_is_ready() -> None:
    rising = [10.0 + minute for minute in range(10)]
    assert _minutes(*rising).units_per_second == pytest.approx(rising[-1] + AHEAD)
    assert _minutes(*reversed(rising)).units_per_second == pytest.approx(rising[0] - AHEAD)
    assert _minutes(*(10.0 * (9 - minute) for minute in range(10))).units_per_second == 0


def test_what_may_be_chance_is_no_trend() -> None:
    for rates in ([9.0, 11.0] * 5, [10.0, 11.0, 12.0]):
        assert _minutes(*rates).units_per_second == pytest.approx(fmean(rates))


@pytest.mark.parametrize(
    ("spare", "wanted"), [(0.15, [1, 6, 11, 115, 1150]), (0.05, [1, 6, 10, 105, 1050]), (0.0, [1, 6, 10, 100, 1000])]
)
def test_a_large_fleet_has_spare_replicas_as_rounding_up_gives_a_small_one(spare: float, wanted: list[int]) -> None:
    demands = (0.2, 5.5, 10, 100, 1000)
    assert [wanted_replicas(backlog(leased=9, busy=1), units, 60, spare) for units in demands] == wanted


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0, 1e6))
def test_any_work_needs_a_replica(ready: int, leased: int, delayed: int, seconds: float) -> None:
    wanted = wanted_replicas(backlog(ready=ready, leased=leased, delayed=delayed, seconds=seconds), None, 30)
    if ready + leased + delayed:
        assert wanted >= 1
        assert (wanted - 1) * 30 <= max(seconds, 1)


async def test_the_policy_follows_the_backlog(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_REDIS_URL", resources.redis_url)
    policy = BacklogPolicy("generation", target_s=0.001, has_run=yes)
    await wait_until(lambda: policy(context(5))[0] == 0)
    await accept(resources, images=4)
    await wait_until(lambda: policy(context(0))[0] > 1)


async def test_one_generator_is_wanted_until_one_has_run_in_the_cluster() -> None:
    """No other kind is: only a generator is waited for. `test_three_nodes.py` sees the housekeeper wait."""
    have_run: list[str] = []
    policy, group, other = (
        BacklogPolicy(pool, 30, read=lambda _: backlog(), has_run=have_run.__contains__)
        for pool in (pool_of(DEFAULT_GROUP), pool_of("sdxl"), JobKind.UPSCALE)
    )
    await wait_until(lambda: policy(context(0))[0] == 1)
    await wait_until(lambda: other(context(1))[0] == 0)
    assert policy(context(0))[0] == 1
    have_run.append(pool_of(DEFAULT_GROUP))
    await wait_until(lambda: policy(context(1))[0] == 0)
    assert group(context(0))[0] == 1


async def test_an_outage_keeps_the_target() -> None:
    is_down = False

    def read(kind: str) -> Backlog:
        if is_down:
            raise StoreUnavailable("no Redis")
        return backlog(ready=1, seconds=90)

    policy = BacklogPolicy("generation", 30, stale_after_s=0.2, read=read, has_run=yes)
    await wait_until(lambda: policy(context(0))[0] == 3)
    is_down = True
    await wait_until(lambda: policy(context(7))[0] == 7)


def test_a_read_that_hangs_does_not_block_the_controller() -> None:
    hanging = threading.Event()

    def read(kind: str) -> Backlog:
        hanging.wait()
        raise AssertionError("never asked for")

    policy = BacklogPolicy("upscale", 30, read=read)
    began = time.perf_counter()
    assert policy(context(2))[0] == 2
    assert time.perf_counter() - began < 5
    hanging.set()


def test_serve_can_carry_the_policy_to_its_controller(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_REDIS_URL", redis_url)
    policy = AutoscalingPolicy(
        policy_function="deployments.scaling:BacklogPolicy", policy_kwargs={"kind": "upscale", "target_s": 5}
    )
    config = AutoscalingConfig(min_replicas=0, max_replicas=2, policy=policy)
    carried = config.policy.get_policy()  # out of the pickle that goes to the controller
    assert carried("upscale", 5)(context(1))[0] in (0, 1)
