"""Holds listeners to jobs' events on one ingress replica of `atelier up`, and measures what one costs.

    .venv/bin/python -m benchmarks.event_streams [--listeners 1000] [--accounts 10] [--held 10]

Each listener has a job and a connection of its own. The first ten come one after the other, the others many at once.
The jobs are claimed here, told of as running at another percentage once a second while all streams are held, and then
ended. Memory and processor time are what the processes on the way have more than before.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from benchmarks.http import cpu_seconds
from benchmarks.long_polls import AT_ONCE, LEASE, Poll, claimed_jobs, each_of, make_account, quantiles
from benchmarks.serve import Server, atelier_up
from benchmarks.servers import finish, roomy_settings
from serve_app.settings import Settings
from tests.composition import open_resources
from tests.support import wait_until

LIMIT_S = 60.0
ALONE = 10
"""How many listeners come one after the other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listeners", type=int, default=1_000)
    parser.add_argument("--accounts", type=int, default=10)
    parser.add_argument("--held", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="event-streams-") as folder:
        settings = roomy_settings(Path(folder)).model_copy(update={"lease": LEASE})
        with atelier_up(settings, Path(folder)) as server:
            asyncio.run(_measure(settings, server, options))


async def _measure(settings: Settings, server: Server, options: argparse.Namespace) -> None:
    async with open_resources(settings) as resources:
        accounts = [await make_account(resources, number) for number in range(options.accounts)]
        jobs = await claimed_jobs(resources, accounts, options.listeners)
        listeners = Listeners(server.port)
        before = _memory(server)
        streams: list[asyncio.Task[None]] = []
        for number, job in enumerate(jobs[:ALONE], start=1):
            streams.append(asyncio.create_task(listeners.follow(job)))
            await wait_until(lambda number=number: len(listeners.first_ms) == number, timeout=LIMIT_S)
        cpu = [cpu_seconds(pid) for pid in server.pids]
        streams += [asyncio.create_task(listeners.follow(job)) for job in jobs[ALONE:]]
        await wait_until(lambda: len(listeners.first_ms) == len(jobs), timeout=LIMIT_S)
        opened = [
            1e3 * (cpu_seconds(pid) - was) / max(1, len(jobs) - ALONE)
            for pid, was in zip(server.pids, cpu, strict=True)
        ]
        began, cpu = time.monotonic(), [cpu_seconds(pid) for pid in server.pids]
        await asyncio.sleep(options.held)
        quiet = _shares(server, cpu, began, len(jobs))
        began, cpu = time.monotonic(), [cpu_seconds(pid) for pid in server.pids]
        for percent in range(1, options.held + 1):
            await _on_all(jobs, lambda job, at=percent: resources.queue.heartbeat(job.lease, progress=at))
            await asyncio.sleep(max(0.0, began + percent - time.monotonic()))
        busy, memory = _shares(server, cpu, began, len(jobs)), _memory(server)
        ended_at: dict[str, float] = {}

        async def end(job: Poll) -> None:
            await finish(resources, job.account.id, job.lease)
            ended_at[job.job_id] = time.monotonic()

        await _on_all(jobs, end)
        await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
        late = [1000 * (listeners.ended_at[job.job_id] - ended_at[job.job_id]) for job in jobs]
        each = [(b - a) / 1024 / len(jobs) for a, b in zip(before, memory, strict=True)]
        lines = [
            f"{len(jobs)} listeners; events: {dict(listeners.events)}",
            f"request to first event, ms, one at a time: {quantiles(listeners.first_ms[:ALONE])}; "
            f"at most {AT_ONCE} at once: {quantiles(listeners.first_ms[ALONE:])}",
            f"processor time of such a request to its first event, ms: {each_of(server, opened)}",
            f"a job's end to its event, ms: {quantiles(late)}",
            f"memory of a listener, kB: {each_of(server, each)}",
            f"processor time a second of a listener, µs: silent {each_of(server, quiet)}; "
            f"told once a second {each_of(server, busy)}",
            f"load {os.getloadavg()}, {options}",
        ]
        sys.stdout.write("\n".join(lines) + "\n")


class Listeners:
    """Streams of events, and what was seen of them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Semaphore(AT_ONCE)
        self.first_ms: list[float] = []
        self.ended_at: dict[str, float] = {}
        self.events: Counter[str] = Counter()

    async def follow(self, job: Poll) -> None:
        async with self._open:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            began = time.monotonic()
            writer.write(
                f"GET /v1/jobs/{job.job_id}/events HTTP/1.1\r\nHost: benchmark\r\n"
                f"Authorization: Bearer {job.account.secret}\r\n\r\n".encode()
            )
            while not (line := await reader.readline()).startswith(b"event: "):
                if not line:
                    raise RuntimeError("no events came")
            self.first_ms.append(1000 * (time.monotonic() - began))
        while line and line != b"event: end\n":
            if line.startswith(b"event: "):
                self.events[line.decode().split()[1]] += 1
            line = await reader.readline()
        self.ended_at[job.job_id] = time.monotonic()
        writer.close()


async def _on_all(jobs: list[Poll], act: Callable[[Poll], Awaitable[object]]) -> None:
    for first in range(0, len(jobs), AT_ONCE):
        await asyncio.gather(*(act(job) for job in jobs[first : first + AT_ONCE]))


def _memory(server: Server) -> list[int]:
    return [psutil.Process(pid).memory_info().rss for pid in server.pids]


def _shares(server: Server, cpu: list[float], began: float, count: int) -> list[float]:
    """Return the processor time, in µs a second of a listener, that each process has used since."""
    seconds = time.monotonic() - began
    return [1e6 * (cpu_seconds(pid) - was) / seconds / count for pid, was in zip(server.pids, cpu, strict=True)]


if __name__ == "__main__":
    main()
