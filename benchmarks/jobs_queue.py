"""What one claim costs as the queue grows.

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
from typing import Any, NamedTuple

import redis

from serve_app.domain.durations import milliseconds
from serve_app.domain.jobs import WORKER_LIFE, JobKind, NewJob, new_job_id
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.jobs.acceptance import accept_row
from serve_app.jobs.backlog import DEFAULT_SECONDS_PER_UNIT
from serve_app.jobs.queue import Fairness, named_in_claim
from serve_app.jobs.records import RECORD_VERSION
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.store.keys import PREFIX, redis_key
from serve_app.store.script import load_script

ACCEPT, CLAIM = load_script("jobs/accept"), load_script("jobs/claim")
CLAIMS = 2_000
PROMPT = "a lighthouse on a cliff at dusk, waves below, gulls in the wind, long exposure, film grain, " * 4
"""About 370 characters: a long ordinary prompt."""
FILL_STRIDE = 500
UNMEASURED_US = 20
"""Claims faster than this count as this."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a full queue: its jobs, accounts and adapters, and the adapters that a worker holds."""

    queued: int
    accounts: int
    adapters: int
    resident: int
    capacity: int = 1


class Cost(NamedTuple):
    """What one claim takes, in ms: the server's processor time, and the clock's."""

    processor: float
    p50: float
    p99: float


SHAPES: dict[str, Sequence[Shape]] = {
    "jobs waiting": [Shape(queued, 100, 100, 32) for queued in (4_000, 20_000, 100_000)],
    "accounts": [Shape(20_000, accounts, 1_000, 32) for accounts in (1, 100, 10_000)],
    "adapters": [Shape(20_000, 1_000, adapters, 32) for adapters in (1, 100, 10_000)],
    "adapters held": [Shape(20_000, 1_000, 10_000, resident) for resident in (0, 8, 128, 1_000)],
    "nothing waits": [Shape(0, 1, 1, resident) for resident in (0, 128, 1_000)],
    "images asked for": [Shape(20_000, 1_000, 1_000, 32, capacity) for capacity in (1, 8, 32)],
}


class Server:
    """An embedded server of its own, without waiting for the disk: what is measured is the scripts."""

    def __init__(self, folder: Path) -> None:
        self.client: Any = redis.Redis.from_url(
            ensure_redis(folder).url, decode_responses=True, encoding_errors="surrogateescape", socket_timeout=600
        )
        self.client.config_set("appendonly", "no")
        self.client.config_set("slowlog-max-len", 2 * CLAIMS)

    def fill(self, shape: Shape) -> None:
        self.client.flushall()
        accept = self.client.script_load(ACCEPT.text)
        for start in range(0, shape.queued, FILL_STRIDE):
            pipeline = self.client.pipeline(transaction=False)
            for number in range(start, min(start + FILL_STRIDE, shape.queued)):
                pipeline.evalsha(accept, 1, PREFIX, *accept_args(number, shape))
            pipeline.execute()

    def claims(self, shape: Shape, number: int) -> Cost:
        resident = [_group(index) for index in range(shape.resident)]
        claim = self.client.script_load(CLAIM.text)
        args = [claim_args(turn, shape.capacity, resident) for turn in range(number)]
        self.client.config_set("slowlog-log-slower-than", UNMEASURED_US)  # 0 would log the commands inside, too
        self.client.slowlog_reset()
        before = self._processor_seconds
        for each in args:
            self.client.evalsha(claim, 1, PREFIX, *each)
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
                for what, shapes in SHAPES.items():
                    for shape in shapes:
                        _report(what, shape, server)
        finally:
            stop_redis(Path(folder))


def _report(what: str, shape: Shape, server: Server) -> None:
    server.fill(shape)
    cost = server.claims(shape, min(CLAIMS, shape.queued // (2 * shape.capacity)) if shape.queued else CLAIMS)
    print(
        f"{what:16} | {shape.queued:9,} jobs {shape.accounts:6,} accounts {shape.adapters:6,} adapters"
        f" {shape.resident:5,} held, capacity {shape.capacity:2}"
        f" | cpu {cost.processor:.3f} p50 {cost.p50:.3f} p99 {cost.p99:.3f} ms",
        flush=True,
    )


def _claim_times(client: Any) -> Iterator[float]:
    """ms of each claim in the slow log; redis-py wraps the entries' fields in bytes or text by version."""
    for entry in client.slowlog_get(2 * CLAIMS):
        if b"EVALSHA" in entry["command"]:
            yield entry["duration"] / 1000


def accept_args(number: int, shape: Shape) -> list[str | bytes | int | float]:
    request = GenerationRequest(prompt=PROMPT, loras=(LoraUse("model_" + "x" * 26),), seeds=(number,))
    day, month = 86_400_000, 30 * 86_400_000
    new = NewJob(
        job_id=new_job_id(JobKind.GENERATION),
        variant=Variant.A,
        account_id=f"acct_{number % shape.accounts:026}",
        request=request,
        weights=_group(number * 7919 % shape.adapters),
        rate_token="r" * 16,
    )
    return ACCEPT.encode(
        {
            "new": accept_row(new),
            "variant": new.variant,
            "account": new.account_id,
            "idempotency_digest": None,
            "given_digest": None,
            "body_digest": None,
            "max_queued": 10**9,
            "max_unfinished": 10**9,
            "max_stored": 10**12,
            "job_bytes": 1_100,
            "idempotency_ms": day,
            "index_ms": month,
            "version": RECORD_VERSION,
            "key_id": None,
            "plan": None,
            "request_id": None,
        }
    )


def claim_args(turn: int, capacity: int, resident: list[str]) -> list[str | bytes | int | float]:
    fairness, hour = Fairness(), 3_600_000
    return CLAIM.encode(
        {
            "pool": JobKind.GENERATION,
            "worker": f"w{turn % 64}",
            "nonce": str(turn),
            "capacity": capacity,
            "lease_ms": hour,
            "max_skips": fairness.max_skips,
            "max_wait_ms": milliseconds(fairness.max_wait),
            "max_lead": fairness.max_lead,
            "owner_wait_ms": milliseconds(fairness.owner_wait),
            "worker_life_ms": milliseconds(WORKER_LIFE),
            "default_seconds_per_unit": DEFAULT_SECONDS_PER_UNIT[JobKind.GENERATION],
            "retention_ms": 720 * hour,
            "resident_weights": named_in_claim(resident),
        }
    )


def _group(index: int) -> str:
    return sha256(str(index).encode()).hexdigest()


if __name__ == "__main__":
    assert redis_key("x").startswith(PREFIX)
    main()
