"""Bounds the fleet's figures from its arrivals alone.

They are the best share of resident adapters, and the replicas asked for against those needed.

    python -m benchmarks.fleet_bounds        # some 15 s; needs no Redis

At best each LoRA is loaded once, and where its jobs are more than one replica can draw in time, on as many as they take. Beyond
that, the share if two or three replicas loaded each LoRA that has so many jobs.

The replicas that demand asks for, of the real scaling decision and without any backlog, are divided by those that what arrives
from one to three minutes later keeps busy, bursts aside: a replica that is started now is ready in a minute.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from statistics import fmean

from benchmarks.fleet import GOAL_S, images_per_hour
from benchmarks.fleet_load import Arrival, OfferedLoad
from benchmarks.fleet_simulation import ENGINE, SHIPPED, Fleet
from deployments.arrival_rate import ArrivalRate
from deployments.scaling import wanted_replicas
from serve_app.domain.jobs import Backlog

LOAD, SEED = 0.7, 1
SETTINGS = ((8, 300, 40, 2, 6.0), (30, 300, 40, 8, 1.5), (100, 1_000, 100, 8, 1.5), (1_000, 10_000, 1_000, 8, 1.5))
"""Replicas, LoRAs, accounts, seconds an image, hours."""
WINDOWS_S = (60, 180, 300, 600, 900)
START_S, READY_FROM_S, READY_TO_S, EVERY_S = 660, 60, 180, 30


def main() -> None:
    print("| replicas | LoRAs | jobs | resident at best | two loads each | three | asked for while it rises | falls |")
    print("|---" * 8 + "|")
    for replicas, loras, accounts, image_s, hours in SETTINGS:
        engine = replace(ENGINE, image_ms=image_s * 1000, alone_ms=1500 * image_s)
        fleet = Fleet(scale=SHIPPED.model_copy(update={"max_replicas": replicas}), engine=engine)
        demand = OfferedLoad(images_per_hour=images_per_hour(fleet, LOAD), hours=hours, loras=loras, accounts=accounts)
        arrivals = demand.arrivals(SEED)
        shares = " | ".join(f"{best_share(arrivals, image_s, loads):.1%}" for loads in (1, 2, 3))
        rising, falling = asked_for(arrivals, image_s, hours * 3600)
        print(f"| {replicas:,} | {loras:,} | {len(arrivals):,} | {shares} | {rising:.2f} | {falling:.2f} |", flush=True)


def best_share(arrivals: Sequence[Arrival], image_s: float, loads: int) -> float:
    """Return the largest share of claims on a resident adapter.

    So many replicas load each LoRA, or as many as its jobs take.
    """
    jobs = Counter(arrival.lora for arrival in arrivals)
    needed: Counter[str] = Counter()
    for window in WINDOWS_S:
        work: Counter[tuple[str, int]] = Counter()
        for arrival in arrivals:
            work[arrival.lora, arrival.at // (window * 1000)] += arrival.images
        in_time = window + GOAL_S + ENGINE.runs * image_s  # from the window's first job to the last's end
        for (lora, _), images in work.items():
            needed[lora] = max(needed[lora], ceil(images * image_s / in_time))
    return 1 - sum(max(needed[lora], min(loads, jobs[lora])) for lora in jobs) / len(arrivals)


def asked_for(arrivals: Sequence[Arrival], image_s: float, end_s: float) -> tuple[float, float]:
    """Replicas asked for as a share of those needed, while the wave rises and while it falls."""
    at = [arrival.at / 1000 for arrival in arrivals]
    accepted = list(accumulate((arrival.images for arrival in arrivals), initial=0))
    usual = list(accumulate((0 if arrival.in_burst else arrival.images for arrival in arrivals), initial=0))

    def usual_until(second: float) -> int:
        return usual[bisect_right(at, second)]

    rate, rising, falling = ArrivalRate(), list[float](), list[float]()
    for second in range(int(end_s) - READY_TO_S):
        rate.add(second, accepted[bisect_right(at, second)])
        if second < START_S or second % EVERY_S:
            continue
        needed = usual_until(second + READY_TO_S) - usual_until(second + READY_FROM_S)
        asked = wanted_replicas(_backlog(image_s), rate.units_per_second, SHIPPED.target_s, SHIPPED.spare)
        share = asked / (needed * image_s / (READY_TO_S - READY_FROM_S))
        (rising if second < end_s / 2 else falling).append(share)
    return fmean(rising), fmean(falling)


def _backlog(image_s: float) -> Backlog:
    """Work under way and none that waits."""
    return Backlog(
        ready=0,
        leased=1,
        delayed=0,
        ready_seconds=0,
        seconds=image_s,
        oldest_age_s=0,
        accepted=0,
        busy_seconds_per_unit=image_s,
    )


if __name__ == "__main__":
    main()
