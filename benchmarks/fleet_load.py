"""What customers send to a fleet: a day's wave with bursts, many accounts, LoRAs drawn by Zipf's law."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

IMAGES, IMAGE_WEIGHTS = (1, 2, 4), (2, 1, 1)
"""Images of a job, and how often: two on average."""
BURST_SHARE = 0.05
"""One account sends this share of an hour's jobs at once, each hour, with one LoRA."""
BURST_GAP_MS = 100
WAVE = 0.3
"""Without a curve, the rate goes from 1 - WAVE to 1 + WAVE times its mean and back, once in the time simulated: the
first third is quiet."""
HOUR_MS = 3_600_000


class Arrival(NamedTuple):
    at: int
    account: str
    lora: str
    images: int
    in_burst: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedLoad:
    """The requests of the simulated hours.

    They are `images_per_hour` on average, bursts included; the most popular of `loras` LoRAs is asked for `loras **
    zipf` times as often as the least. `curve` has the rates at even distances over these hours, in any unit; between
    two of them the rate goes straight, and from the last to the first.
    """

    images_per_hour: float
    hours: float = 6.0
    loras: int = 300
    accounts: int = 40
    zipf: float = 1.0
    curve: Sequence[float] = ()

    @property
    def end_ms(self) -> int:
        return int(self.hours * HOUR_MS)

    def rate(self, at_ms: float) -> float:
        """Return the rate at a time, as a multiple of its mean."""
        if not self.curve:
            return 1 - WAVE * math.cos(2 * math.pi * at_ms / self.end_ms)
        place, part = divmod(at_ms / self.end_ms * len(self.curve), 1)
        here, following = (self.curve[(int(place) + each) % len(self.curve)] for each in (0, 1))
        return (here + part * (following - here)) * len(self.curve) / sum(self.curve)

    @property
    def highest_rate(self) -> float:
        return max(self.curve) * len(self.curve) / sum(self.curve) if self.curve else 1 + WAVE

    def arrivals(self, seed: int) -> list[Arrival]:
        return sorted(_arrivals(self, random.Random(seed)))


def _arrivals(demand: OfferedLoad, rnd: random.Random) -> Iterator[Arrival]:
    mean_images = sum(map(math.prod, zip(IMAGES, IMAGE_WEIGHTS, strict=True))) / sum(IMAGE_WEIGHTS)
    jobs_per_hour = demand.images_per_hour / mean_images
    choose_lora = _Zipf("lora", demand.loras, demand.zipf)
    choose_account = _Zipf("account", demand.accounts, 0.8)

    def arrival(at: float, account: str, lora: str, *, in_burst: bool = False) -> Arrival:
        return Arrival(int(at), account, lora, rnd.choices(IMAGES, IMAGE_WEIGHTS)[0], in_burst)

    at, highest = 0.0, jobs_per_hour * (1 - BURST_SHARE) * demand.highest_rate / HOUR_MS
    while (at := at + rnd.expovariate(highest)) < demand.end_ms:
        if rnd.random() * demand.highest_rate < demand.rate(at):
            yield arrival(at, choose_account(rnd), choose_lora(rnd))
    for hour in range(math.ceil(demand.hours)):
        start = (hour + rnd.random()) * HOUR_MS
        account, lora = choose_account(rnd), choose_lora(rnd)
        for number in range(round(jobs_per_hour * BURST_SHARE)):
            if (at := start + number * BURST_GAP_MS) < demand.end_ms:
                yield arrival(at, account, lora, in_burst=True)


class _Zipf:
    def __init__(self, name: str, count: int, exponent: float) -> None:
        self._names: Sequence[str] = [f"{name}{number}" for number in range(count)]
        weights = [(number + 1) ** -exponent for number in range(count)]
        self._cumulative = [sum(weights[: number + 1]) for number in range(count)]

    def __call__(self, rnd: random.Random) -> str:
        return rnd.choices(self._names, cum_weights=self._cumulative)[0]
