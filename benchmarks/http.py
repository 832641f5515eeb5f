"""Measures accept and poll through HTTP with and without durability, in one run.

    .venv/bin/python -m benchmarks.http [--rounds 5] [--seconds 4] [--connections 32]

One uvicorn process serves the real application on loopback; this process calls it over keep-alive connections. Redis
changes its durability between rounds (`CONFIG SET`), in turn, so that a slow moment of the machine meets all of them.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import redis

from benchmarks.servers import SERVE, roomy_settings, spread, start_server
from serve_app.domain.requests import Variant
from serve_app.settings import ROOT, Settings
from serve_app.store.embedded_redis import stop_redis
from tests.composition import open_resources

MODES: dict[str, dict[str, str]] = {
    "always": {"appendonly": "yes", "appendfsync": "always"},
    "no fsync": {"appendonly": "yes", "appendfsync": "no"},
    "no file": {"appendonly": "no"},
}
"""`always` is what the service promises with; the others lose acknowledged jobs at a power cut, or at any kill."""
WARM_UP_S = 1.0


class Measured(NamedTuple):
    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """Processor time of the serving processes per request: on a shared machine the steadier figure."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="http-") as folder:
        settings = roomy_settings(Path(folder))
        try:
            asyncio.run(_measure(settings, options.rounds, options.seconds, options.connections))
        finally:
            stop_redis(settings.data_dir)


async def _measure(settings: Settings, rounds: int, seconds: float, connections: int) -> None:
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("benchmark", plan_a="roomy")
        _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
        lora_id = (await resources.catalog.all())[0].id
        plain = redis.Redis.from_url(resources.redis_url, decode_responses=True, encoding_errors="surrogateescape")
    with start_server(SERVE, [str(ROOT)], settings) as (port, pid):
        callers = Callers(port, [pid], secret, lora_id, connections)
        accepts: dict[str, list[Measured]] = {mode: [] for mode in MODES}
        polls: dict[str, list[Measured]] = {mode: [] for mode in MODES}
        await callers.accept(WARM_UP_S)
        for number in range(rounds):
            for mode, config in MODES.items():
                _set_durability(plain, config)
                accepts[mode].append(await callers.accept(seconds))
                polls[mode].append(await callers.poll(seconds))
                _print(f"round {number + 1}, {mode}: {accepts[mode][-1].per_s:.0f} accepts a second, ")
                _print(f"{polls[mode][-1].per_s:.0f} polls\n")
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    _print(f"\n{rounds} rounds of {seconds:g} s each, {connections} connections, {os.cpu_count()} cores, load {load}, ")
    _print(f"{len(callers.ids)} jobs\n\n" + "\n".join(_report(accepts, polls)) + "\n")


def _set_durability(plain: redis.Redis, config: dict[str, str]) -> None:
    for name, value in config.items():
        plain.config_set(name, value)
    while plain.info("persistence")["aof_rewrite_in_progress"]:  # switching the file on rewrites it
        time.sleep(0.05)


class Callers:
    """Callers on keep-alive connections, each with one request under way."""

    def __init__(
        self, port: int, servers: Sequence[int], secret: str, lora_id: str, connections: int, name: str = "benchmark"
    ) -> None:
        self._port = port
        self._servers = servers
        self._name = name
        self._connections = connections
        self._credential = f"Host: benchmark\r\nAuthorization: Bearer {secret}\r\n"
        self._lora_id = lora_id
        self._numbers = count()
        self.ids: list[str] = []

    async def accept(self, seconds: float) -> Measured:
        return await self._run(self._accept_request, seconds, remember=True)

    async def poll(self, seconds: float) -> Measured:
        return await self._run(self._poll_request, seconds, remember=False)

    def _accept_request(self) -> bytes:
        number = next(self._numbers)
        body = json.dumps({"prompt": f"lighthouse {number}", "lora_id": self._lora_id, "seed": number})
        return (
            f"POST /v1/generate HTTP/1.1\r\n{self._credential}Idempotency-Key: {self._name}-{number}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    def _poll_request(self) -> bytes:
        job_id = self.ids[next(self._numbers) * 7919 % len(self.ids)]
        return f"GET /v1/generate/{job_id} HTTP/1.1\r\n{self._credential}\r\n".encode()

    async def _run(self, request: Callable[[], bytes], seconds: float, *, remember: bool) -> Measured:
        times: list[float] = []
        began, cpu = time.perf_counter(), self._cpu_seconds()
        calls = (self._call_until(began + seconds, request, times, remember=remember) for _ in range(self._connections))
        await asyncio.gather(*calls)
        took = time.perf_counter() - began
        cuts = statistics.quantiles(times, n=100)
        cpu_ms = 1000 * (self._cpu_seconds() - cpu) / len(times)
        return Measured(len(times) / took, 1000 * cuts[49], 1000 * cuts[98], cpu_ms)

    def _cpu_seconds(self) -> float:
        return sum(cpu_seconds(server) for server in self._servers)

    async def _call_until(
        self, end: float, request: Callable[[], bytes], times: list[float], *, remember: bool
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while (began := time.perf_counter()) < end:
            writer.write(request())
            body = await _answer(reader)
            times.append(time.perf_counter() - began)
            if remember:
                self.ids.append(json.loads(body)["request_id"])
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Return the body of a response that must be a success."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head[9:12] not in (b"200", b"202"):
        raise RuntimeError(head.decode())
    length = head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]
    return await reader.readexactly(int(length))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _report(accepts: dict[str, list[Measured]], polls: dict[str, list[Measured]]) -> Iterator[str]:
    yield "| | appendfsync | per second | p50 ms | p99 ms | CPU ms each | against no file |"
    yield "|---|---|---|---|---|---|---|"
    for name, results in (("accept", accepts), ("poll", polls)):
        free = statistics.median(row.per_s for row in results["no file"])
        for mode, rows in results.items():
            share = statistics.median(row.per_s for row in rows) / free
            cells = [spread([row[field] for row in rows], digits) for field, digits in ((0, 0), (1, 1), (2, 1), (3, 2))]
            yield f"| {name} | {mode} | {' | '.join(cells)} | {100 * share:.0f} % |"


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
