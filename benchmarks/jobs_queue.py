"""What one claim costs as the queue grows, and what a waiting job weighs.

    python -m benchmarks.jobs_queue                 # up to 100,000 waiting jobs
    python -m benchmarks.jobs_queue --queued 1000000

The scripts' own time is read from the server's slow log, so that other load on the machine blurs it little.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple, cast

import redis

from serve_app.domain.jobs import JobKind, new_job_id
from serve_app.domain.requests import GenerationRequest
from serve_app.stores.embedded import ensure_redis, stop_redis
from serve_app.stores.jobs import Fairness
from serve_app.stores.records import DEFAULT_PACE, images_of, work_of, write_request
from serve_app.stores.redis import PREFIX, key, script_text

CLAIMS = 2_000
PROMPT = "a lighthouse on a cliff at dusk, waves below, gulls in the wind, long exposure, film grain, " * 4
"""About 370 characters: a long ordinary prompt."""
FILL_STRIDE = 500
UNMEASURED_US = 20
"""Claims faster than this count as this."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A full queue: so many jobs of so many accounts and adapters; a worker that holds so many of those adapters."""

    queued: int
    accounts: int
    adapters: int
    resident: int
    room: int = 1


class Cost(NamedTuple):
    """Of one claim, in ms: the server's processor time, and what the clock on the wall said."""

    processor: float
    p50: float
    p99: float


BASE = Shape(queued=100_000, accounts=1_000, adapters=1_000, resident=32)
SHAPES: dict[str, Sequence[Shape]] = {
    "jobs waiting": [Shape(queued, 100, 100, 32) for queued in (4_000, 20_000, 100_000)],
    "accounts": [Shape(20_000, accounts, 1_000, 32) for accounts in (1, 100, 10_000)],
    "adapters": [Shape(20_000, 1_000, adapters, 32) for adapters in (1, 100, 10_000)],
    "adapters held": [Shape(20_000, 1_000, 10_000, resident) for resident in (0, 8, 128, 1_000)],
    "images asked for": [Shape(20_000, 1_000, 1_000, 32, room) for room in (1, 8, 32)],
}


class Server:
    """An embedded server of its own, without waiting for the disk: what is measured is the scripts."""

    def __init__(self, folder: Path) -> None:
        self.client = cast(
            Any, redis.Redis.from_url(ensure_redis(folder).url, decode_responses=True, socket_timeout=600)
        )
        self.client.config_set("appendonly", "no")
        self.client.config_set("slowlog-max-len", 2 * CLAIMS)

    def fill(self, shape: Shape) -> None:
        self.client.flushall()
        self.accept = self.client.script_load(script_text("accept"))
        self.claim = self.client.script_load(script_text("claim"))
        for start in range(0, shape.queued, FILL_STRIDE):
            pipeline = self.client.pipeline(transaction=False)
            for number in range(start, min(start + FILL_STRIDE, shape.queued)):
                pipeline.evalsha(self.accept, 1, PREFIX, *_accept_words(number, shape))
            pipeline.execute()

    def claims(self, shape: Shape, number: int) -> Cost:
        resident = [_group(index) for index in range(shape.resident)]
        words = _claim_words()
        self.client.config_set("slowlog-log-slower-than", UNMEASURED_US)  # 0 would log the commands inside, too
        self.client.slowlog_reset()
        before = self._processor_seconds
        for turn in range(number):
            self.client.evalsha(
                self.claim, 1, PREFIX, JobKind.GENERATION, f"w{turn % 64}", turn, shape.room, *words, *resident
            )
        spent = self._processor_seconds - before
        self.client.config_set("slowlog-log-slower-than", -1)
        times = sorted(_claim_times(self.client))
        times = [UNMEASURED_US / 1000] * (number - len(times)) + times
        cuts = quantiles(times, n=100)
        return Cost(1000 * spent / number, cuts[49], cuts[98])

    @property
    def _processor_seconds(self) -> float:
        facts = self.client.info("cpu")
        return facts["used_cpu_user"] + facts["used_cpu_sys"]

    @property
    def used_memory(self) -> int:
        return self.client.info("memory")["used_memory"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--queued", type=int, help="measure one queue of this length instead")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            if chosen.queued:
                _report("jobs waiting", Shape(chosen.queued, 1_000, 1_000, 32), server)
            else:
                _print_memory(server)
                for what, shapes in SHAPES.items():
                    for shape in shapes:
                        _report(what, shape, server)
        finally:
            stop_redis(Path(folder))


def _report(what: str, shape: Shape, server: Server) -> None:
    server.fill(shape)
    cost = server.claims(shape, min(CLAIMS, shape.queued // (2 * shape.room)))
    print(
        f"{what:16} | {shape.queued:9,} jobs {shape.accounts:6,} accounts {shape.adapters:6,} adapters"
        f" {shape.resident:5,} held, room {shape.room:2} | cpu {cost.processor:.3f} p50 {cost.p50:.3f} p99 {cost.p99:.3f} ms",
        flush=True,
    )


def _print_memory(server: Server) -> None:
    server.client.flushall()
    empty = server.used_memory
    server.fill(BASE)
    grown = server.used_memory - empty
    print(f"{BASE.queued:,} waiting jobs, prompts of {len(PROMPT)} characters: {grown / 1e6:.0f} MB,", end=" ")
    print(f"{grown / BASE.queued:.0f} bytes a job", flush=True)


def _claim_times(client: Any) -> Iterator[float]:
    """ms of each claim in the slow log; redis-py wraps the entries' fields in bytes or text by version."""
    for entry in client.slowlog_get(2 * CLAIMS):
        if b"EVALSHA" in entry["command"]:
            yield entry["duration"] / 1000


def _accept_words(number: int, shape: Shape) -> list[str | int | float]:
    request = GenerationRequest(prompt=PROMPT, lora_id="model_" + "x" * 26, seeds=(number,))
    account = f"acct_{number % shape.accounts:026}"
    group = _group(number * 7919 % shape.adapters)
    day, month = 86_400_000, 30 * 86_400_000
    return [
        new_job_id(JobKind.GENERATION),
        JobKind.GENERATION,
        "a",
        account,
        group,
        work_of(request),
        1.0,
        images_of(request),
        write_request(request),
        "r" * 16,
        "",
        "",
        10**9,
        10**9,
        day,
        month,
        "",
        1,
    ]


def _claim_words() -> list[float]:
    fairness, hour = Fairness(), 3_600_000
    return [
        hour,
        fairness.max_skips,
        fairness.max_wait.total_seconds() * 1000,
        fairness.max_lead,
        fairness.owner_wait.total_seconds() * 1000,
        60_000,
        DEFAULT_PACE[JobKind.GENERATION],
    ]


def _group(index: int) -> str:
    return sha256(str(index).encode()).hexdigest()


if __name__ == "__main__":
    assert key("x").startswith(PREFIX)
    main()
