"""Waits, adapter swaps and skips under three policies: a simulation of workers on the real scripts.

    python -m benchmarks.jobs_fairness                # 4 workers, 12 adapters; some 20 s
    python -m benchmarks.jobs_fairness --large        # 1,000 workers, 10,000 adapters; some minutes

Time is logical: the scripts read a clock that the simulation moves from event to event, so that an hour of service
takes seconds. One account sends a burst at the start; small accounts send steadily. Adapters are drawn by Zipf's law.
"""

import argparse
import asyncio
import heapq
import random
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.domain.jobs import CommitReply, JobKind, NewJob
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.store.keys import PREFIX
from tests.jobs.logical_queue import LogicalQueue, model_settings

RUN_MS, SWAP_MS = 4_000, 1_500
"""A job's time on a worker, and what loading an adapter adds (`research/reliability.md`, 2.10)."""
BUSY = "greedy"
LOAD = 0.89
"""What the small accounts ask for, against what the workers could do if they never loaded an adapter; the burst comes
on top. The figure of the earlier measurement, so that the tables compare."""
POLL_MS = 500
"""An idle worker looks again after this long."""
AT_ONCE = 32
INSTANT_MS = 50
"""Workers that are free within the same instant ask at once, as they would; it also spares round trips."""


@dataclass(frozen=True, slots=True)
class Plan:
    workers: int
    slots: int
    adapters: int
    jobs: int
    burst: int
    small_accounts: int


class Arrival(NamedTuple):
    at: int
    account: str
    group: str


SMALL = Plan(workers=4, slots=2, adapters=12, jobs=1_200, burst=400, small_accounts=8)
LARGE = Plan(workers=1_000, slots=8, adapters=10_000, jobs=12_000, burst=4_000, small_accounts=200)


@dataclass
class Outcome:
    waits: dict[str, list[float]] = field(default_factory=lambda: {"small": [], BUSY: []})
    served: int = 0
    swaps: int = 0
    skips: int = 0
    makespan: float = 0.0

    def line(self, name: str) -> str:
        small, busy = sorted(self.waits["small"]), sorted(self.waits[BUSY])
        return (
            f"{name:14} | makespan {self.makespan:6.0f} s | swaps {self.swaps:6,} | small accounts wait"
            f" p50 {_quantile(small, 0.5):6.1f} p99 {_quantile(small, 0.99):6.1f} max {small[-1]:6.1f} s"
            f" | burst p50 {_quantile(busy, 0.5):6.1f} max {busy[-1]:6.1f} s | most skips of a head {self.skips}"
        )


@dataclass
class SimulatedWorker:
    """`held`: its adapters, the least lately used first."""

    name: str
    slots: int
    held: OrderedDict[str, None] = field(default_factory=lambda: OrderedDict[str, None]())

    def take(self, group: str) -> bool:
        """True when the adapter had to be loaded."""
        is_new = group not in self.held
        self.held[group] = None
        self.held.move_to_end(group)
        if len(self.held) > self.slots:
            self.held.popitem(last=False)
        return is_new


async def simulate(queue: LogicalQueue, plan: Plan, *, fair: bool, grouped: bool, seed: int = 1) -> Outcome:
    rnd = random.Random(seed)
    arrivals = sorted(_arrivals(plan, rnd), key=lambda arrival: arrival.at)
    outcome, start = Outcome(), queue.now
    workers = [_warm_worker(f"w{number}", plan, rnd) for number in range(plan.workers)]
    free = [(0, number) for number in range(plan.workers)]
    next_arrival = 0
    while outcome.served < plan.jobs:
        at = free[0][0]
        first = next_arrival
        while next_arrival < len(arrivals) and arrivals[next_arrival].at <= at:
            next_arrival += 1
        await _accept_all(queue, arrivals, range(first, next_arrival), start, fair=fair)
        _set_clock(queue, start + at)
        asking: list[int] = []
        while free and free[0][0] < at + INSTANT_MS:
            asking.append(heapq.heappop(free)[1])
        for some in _batches(asking):
            busy = await asyncio.gather(
                *(_serve_one(queue, workers[number], arrivals, at, outcome, grouped=grouped) for number in some)
            )
            for number, busy_ms in zip(some, busy, strict=True):
                heapq.heappush(free, (at + (busy_ms or POLL_MS), number))
    return outcome


async def _serve_one(
    queue: LogicalQueue,
    worker: SimulatedWorker,
    arrivals: Sequence[Arrival],
    at: int,
    outcome: Outcome,
    *,
    grouped: bool,
) -> int | None:
    """Return how long the worker is busy with what it got; None when it got nothing."""
    resident = tuple(worker.held) if grouped else ()
    claims = await queue.claim(worker.name, pool=JobKind.GENERATION, nonce=f"{at}", resident=resident, limit=1)
    if not claims:
        return None
    (claim,) = claims
    arrival = arrivals[int(claim.lease.job_id.removeprefix("j"))]
    is_swap = worker.take(arrival.group)
    busy_ms = RUN_MS + (SWAP_MS if is_swap else 0)
    outcome.served += 1
    outcome.swaps += is_swap
    outcome.waits[BUSY if arrival.account == BUSY else "small"].append((at - arrival.at) / 1000)
    outcome.skips = max(outcome.skips, int(await _skips(queue, claim.lease.job_id)))
    # committed at once with its measured time; the worker is busy until then
    assert await queue.finish(claim.lease, [], seconds=busy_ms / 1000) is CommitReply.OK
    outcome.makespan = max(outcome.makespan, (at + busy_ms) / 1000)
    return busy_ms


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--large", action="store_true", help="1,000 workers, 10,000 adapters, 12,000 jobs")
    arguments.add_argument("--seeds", type=int, default=1)
    chosen = arguments.parse_args()
    asyncio.run(_compare(LARGE if chosen.large else SMALL, range(1, chosen.seeds + 1)))


async def _compare(plan: Plan, seeds: Sequence[int]) -> None:
    print(plan, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = ensure_redis(Path(folder))
        limits = {"max_queued": 10**9, "max_queued_per_account": 10**9, "queue_age_limit": timedelta(days=30)}
        settings = model_settings(Path(folder), **limits)
        policies = {"fifo": (False, False), "fair": (True, False), "fair + grouped": (True, True)}
        try:
            for seed in seeds:
                for name, (fair, grouped) in policies.items():
                    queue = LogicalQueue(server.url, settings)
                    queue.sync.config_set("appendonly", "no")
                    outcome = await simulate(queue, plan, fair=fair, grouped=grouped, seed=seed)
                    print(outcome.line(name), flush=True)
                    await queue.close()
        finally:
            stop_redis(Path(folder))


def _arrivals(plan: Plan, rnd: random.Random) -> Iterator[Arrival]:
    groups = [f"g{number}" for number in range(plan.adapters)]
    weights = [1 / (number + 1) for number in range(plan.adapters)]
    steady = plan.jobs - plan.burst
    gap = RUN_MS / plan.workers / LOAD
    names = iter(rnd.choices(groups, weights, k=plan.jobs))
    for _ in range(plan.burst):
        yield Arrival(0, BUSY, next(names))
    for number in range(steady):
        yield Arrival(int(number * gap), f"small{rnd.randrange(plan.small_accounts)}", next(names))


def _warm_worker(name: str, plan: Plan, rnd: random.Random) -> SimulatedWorker:
    """Return a worker that has been at work before: its slots hold adapters drawn as jobs are."""
    worker = SimulatedWorker(name, plan.slots)
    weights = [1 / (number + 1) for number in range(plan.adapters)]
    for number in rnd.choices(range(plan.adapters), weights, k=4 * plan.slots):
        worker.take(f"g{number}")
    return worker


async def _accept_all(
    queue: LogicalQueue, arrivals: Sequence[Arrival], numbers: range, start: int, *, fair: bool
) -> None:
    """Accept in order, so that waiting jobs stand in it too; those of one millisecond together."""
    for at, together in groupby(numbers, key=lambda number: arrivals[number].at):
        _set_clock(queue, start + at)
        for some in _batches(together):
            await asyncio.gather(*(_accept(queue, number, arrivals[number], fair=fair) for number in some))


async def _accept(queue: LogicalQueue, number: int, arrival: Arrival, *, fair: bool) -> None:
    await queue.accept(
        NewJob(
            job_id=f"j{number}",
            variant=Variant.A,
            account_id=arrival.account if fair else "everyone",
            request=GenerationRequest(prompt="a boat", loras=(LoraUse("model_x"),), seeds=(number,)),
            weights=arrival.group,
        )
    )


async def _skips(queue: LogicalQueue, job_id: str) -> str:
    client: Any = queue.client
    return await client.hget(f"{PREFIX}job:{job_id}", "skips") or "0"


def _batches(numbers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield few enough at once for the client's connections."""
    rest = iter(numbers)
    while some := tuple(islice(rest, AT_ONCE)):
        yield some


def _set_clock(queue: LogicalQueue, at: int) -> None:
    queue.advance(at - queue.now)


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
