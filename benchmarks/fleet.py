"""Measures GPU-hours, waits and adapters of a simulated fleet, against an oracle.

    python -m benchmarks.fleet                               # 8 replicas at 70 % load, six hours: some 90 s
    python -m benchmarks.fleet --loads 0.3 0.5 0.7 0.85      # other loads
    python -m benchmarks.fleet --node-losses 6               # a node of four replicas dies six times
    python -m benchmarks.fleet --replicas 1000 --loras 10000 --accounts 1000 --image-s 8 --hours 1 --node-losses 4

Real are the Redis scripts that accept, order, claim and finish jobs, the scaling decision, and Serve's delays; the
replicas, their adapter slots and the clock are simulated. The load is what arrives, as a share of what all replicas
could draw with full forward passes. The day's wave is compressed into the hours simulated, so that it rises more
steeply than in reality. The fleet begins with no replica, and its GPU-hours count from the decision to start one until
it is gone, cold start and drain included.

The oracle (`benchmarks/fleet_oracle.py`) is the least replica-hours with which every job starts within the goal of 30
s, cold starts included: a lower bound, of fractions of replicas that are always fully busy, in any number.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import uvloop

from benchmarks.fleet_load import HOUR_MS, OfferedLoad
from benchmarks.fleet_oracle import oracle_hours
from benchmarks.fleet_outcome import Outcome, Sample
from benchmarks.fleet_simulation import Fleet, Simulation
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from tests.jobs.logical_queue import LogicalQueue, model_settings

GOAL_S = 30.0
PROGRESS_MS = 600_000
HEADER = (
    "| load | seed | jobs | on a resident adapter | in the second half | prefetched a job | GPU-hours | oracle | ratio"
    " | wait p50 s | p99 s | over 30 s | bursts p50 s | p99 s | cold starts | lost |\n" + "|---" * 16 + "|"
)


async def simulate(
    redis_url: str,
    folder: Path,
    fleet: Fleet,
    demand: OfferedLoad,
    seed: int,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> Outcome:
    """Simulate on a Redis that is emptied for it."""
    limits = {"max_queued": 10**9, "max_queued_per_account": 10**9, "queue_age_limit": timedelta(days=30)}
    queue = LogicalQueue(redis_url, model_settings(folder, **limits))
    queue.sync.config_set("appendonly", "no")
    try:
        return await Simulation(queue, fleet, demand.arrivals(seed), demand.end_ms, seed, on_sample).run()
    finally:
        await queue.close()


def show_progress(sample: Sample) -> None:
    """Tell every ten minutes simulated how far it is, on standard error."""
    if sample.claims and sample.at_ms % PROGRESS_MS == 0:
        print(
            f"{sample.at_ms / HOUR_MS:.1f} h: {sample.claims:,} jobs, {1 - sample.loads / sample.claims:.1%} on a"
            f" resident adapter, {sample.replicas} replicas, {sample.waiting} jobs wait",
            file=sys.stderr,
        )


def oracle(fleet: Fleet, demand: OfferedLoad, seed: int) -> float:
    """Return the replica-hours that the oracle would have needed."""
    engine = fleet.engine
    return oracle_hours(
        demand.arrivals(seed),
        demand.end_ms,
        image_ms=engine.image_ms,
        deadline_ms=GOAL_S * 1000 + engine.pass_ms(engine.runs),
        cold_start_ms=fleet.cold_start_ms,
    )


def images_per_hour(fleet: Fleet, load: float) -> float:
    return load * fleet.scale.max_replicas * HOUR_MS / fleet.engine.image_ms


def line(load: float, seed: int, outcome: Outcome, least_hours: float) -> str:
    waits, burst = sorted(outcome.waits), sorted(outcome.burst_waits)
    half = next(sample for sample in outcome.samples if sample.at_ms >= outcome.samples[-1].at_ms / 2)
    loads = outcome.claims - outcome.resident - half.loads
    late = sum(wait > GOAL_S for wait in waits) / len(waits)
    return (
        f"| {load:.0%} | {seed} | {outcome.claims:,} | {outcome.resident / outcome.claims:.1%}"
        f" | {1 - loads / (outcome.claims - half.claims):.1%}"
        f" | {outcome.prefetched / outcome.claims:.2f}"
        f" | {outcome.gpu_hours:.1f} | {least_hours:.1f} | {outcome.gpu_hours / least_hours:.2f}"
        f" | {_quantile(waits, 0.5):.1f} | {_quantile(waits, 0.99):.0f} | {late:.1%}"
        f" | {_quantile(burst, 0.5):.0f} | {_quantile(burst, 0.99):.0f} | {outcome.cold_starts} | {outcome.lost} |"
    )


async def compare(fleet: Fleet, demand: OfferedLoad, loads: Sequence[float], seeds: Sequence[int]) -> None:
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = ensure_redis(folder)
        try:
            for load in loads:
                loaded = replace(demand, images_per_hour=images_per_hour(fleet, load))
                for seed in seeds:
                    outcome = await simulate(server.url, folder, fleet, loaded, seed, show_progress)
                    print(line(load, seed, outcome, oracle(fleet, loaded, seed)), flush=True)
        finally:
            stop_redis(folder)


def main() -> None:
    fleet, demand = Fleet(), OfferedLoad(images_per_hour=0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--hours", type=float, default=demand.hours)
    parser.add_argument("--replicas", type=int, default=fleet.scale.max_replicas, help="the most there may be")
    parser.add_argument("--loras", type=int, default=demand.loras)
    parser.add_argument("--accounts", type=int, default=demand.accounts)
    parser.add_argument("--slots", type=int, default=fleet.engine.slots, help="adapters that one replica holds")
    parser.add_argument("--image-s", type=float, default=fleet.engine.image_ms / 1000, help="of a fully busy replica")
    parser.add_argument("--spare", type=float, default=fleet.scale.spare, help="replicas beyond demand, as a share")
    parser.add_argument("--node-losses", type=int, default=0, help="how often a node dies with its replicas")
    parser.add_argument("--node-replicas", type=int, default=fleet.node_replicas)
    chosen = parser.parse_args()
    image_ms = chosen.image_s * 1000
    fleet = Fleet(
        scale=fleet.scale.model_copy(update={"max_replicas": chosen.replicas, "spare": chosen.spare}),
        engine=replace(fleet.engine, slots=chosen.slots, image_ms=image_ms, alone_ms=1.5 * image_ms),
        node_losses=chosen.node_losses,
        node_replicas=chosen.node_replicas,
    )
    demand = replace(demand, hours=chosen.hours, loras=chosen.loras, accounts=chosen.accounts)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare(fleet, demand, chosen.loads, chosen.seeds))


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


if __name__ == "__main__":
    main()
