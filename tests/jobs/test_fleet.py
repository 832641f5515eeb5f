"""In the simulated fleet every job ends, the oracle is a bound, and a seed gives the same figures."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet import images_per_hour, oracle, simulate
from benchmarks.fleet_load import WAVE, Arrival, OfferedLoad
from benchmarks.fleet_oracle import oracle_hours
from benchmarks.fleet_simulation import SHIPPED, Fleet

FLEET = Fleet(scale=SHIPPED.model_copy(update={"max_replicas": 3}), cold_start_ms=20_000)
LOAD = OfferedLoad(images_per_hour=images_per_hour(FLEET, 0.6), hours=0.1, loras=20, accounts=5)


async def test_a_simulated_fleet_ends_every_job_and_is_repeatable(redis_url: str, tmp_path: Path) -> None:
    outcome = await simulate(redis_url, tmp_path, FLEET, LOAD, 1)
    assert outcome.claims == len(outcome.waits + outcome.burst_waits) == len(LOAD.arrivals(1)) > 50
    assert min(outcome.waits) >= 0
    assert 20 <= outcome.claims - outcome.resident <= 60, "each LoRA is loaded once at least, by three replicas at most"
    assert outcome.gpu_hours >= 0.8 * oracle(FLEET, LOAD, 1)
    assert max(sample.replicas for sample in outcome.samples) <= 3
    assert await simulate(redis_url, tmp_path, FLEET, LOAD, 1) == outcome


@pytest.mark.slow
async def test_what_dies_with_a_node_is_drawn_by_others(redis_url: str, tmp_path: Path) -> None:
    fleet = replace(FLEET, node_losses=2, node_replicas=2)
    outcome = await simulate(redis_url, tmp_path, fleet, LOAD, 1)
    jobs = len(LOAD.arrivals(1))
    assert len(outcome.waits + outcome.burst_waits) == jobs, "each ends once"
    assert outcome.lost > 0
    assert outcome.claims == jobs + outcome.lost


def test_the_oracle_does_all_work_in_time_and_pays_for_starts() -> None:
    """Half an hour of one replica's work at once, due within 100 s, takes 18 replicas for 100 s."""
    arrivals = [Arrival(0, "a", "l", 900)]
    hours = oracle_hours(arrivals, 3_600_000, image_ms=2_000, deadline_ms=100_000, cold_start_ms=0)
    assert round(hours, 3) == 0.5
    dear = oracle_hours(arrivals, 3_600_000, image_ms=2_000, deadline_ms=100_000, cold_start_ms=60_000)
    assert 0.5 + 15 / 60 <= dear <= 0.5 + 18 / 60


@pytest.mark.parametrize(("curve", "middle"), [((), 0.5 + WAVE / math.pi), ((1, 3), 0.625), ((0, 1), 0.75)])
def test_a_load_is_what_arrives_and_follows_its_curve(curve: tuple[float, ...], middle: float) -> None:
    demand = replace(LOAD, images_per_hour=9_000, hours=2.0, curve=curve)
    arrivals = demand.arrivals(3)
    assert 0.9 <= sum(arrival.images for arrival in arrivals) / 18_000 <= 1.1
    steady = [arrival.at / demand.end_ms for arrival in arrivals if not arrival.in_burst]
    assert sum(0.25 <= at < 0.75 for at in steady) / len(steady) == pytest.approx(middle, abs=0.02)
