"""Holds thousands of polls with `Prefer: wait=N` on one ingress replica, and checks every answer.

    .venv/bin/python -m benchmarks.long_polls [--polls 2000 5000] [--accounts 10] [--wait 30] [--held 10]

Each poll has a job and a connection of its own. Half of the jobs are ended while all polls are held; the others stay as
they are until the wait is over. Meanwhile one more caller polls without waiting, twenty times a second. The jobs are
claimed and ended here, so that no generator works beside. Memory and processor time are what the processes on the way
have more than before.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import redis

from benchmarks.http import cpu_seconds
from benchmarks.serve import Server, atelier_up, title_of
from benchmarks.servers import finish, roomy_settings
from serve_app.domain.accounts import Caller
from serve_app.domain.jobs import JobKind, Lease
from serve_app.domain.requests import GenerationDraft, LoraUse, Variant
from serve_app.jobs.queue import new_nonce
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.support import wait_until

AT_ONCE = 64
"""Connections that are opened, jobs that are accepted or ended, at a time."""
OTHER_EVERY_S = 0.05
SETTLED_MS = 100.0
OPEN_LIMIT_S = 60.0
LEASE = timedelta(hours=1)


class Account(NamedTuple):
    id: str
    secret: str


class Poll(NamedTuple):
    lease: Lease
    account: Account

    @property
    def job_id(self) -> str:
        return self.lease.job_id


class Usage(NamedTuple):
    """What the processes on the way have used so far, and the connections to Redis."""

    at: float
    cpu_s: list[float]
    memory: list[int]
    redis_clients: int

    def shares_since(self, other: "Usage") -> list[float]:
        """Return the share of a processor that each process used."""
        return [(b - a) / (self.at - other.at) for a, b in zip(other.cpu_s, self.cpu_s, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--polls", type=int, nargs="+", default=[2000, 5000])
    parser.add_argument("--accounts", type=int, default=10)
    parser.add_argument("--wait", type=int, default=30)
    parser.add_argument("--held", type=float, default=10.0)
    options = parser.parse_args()
    most = max(options.polls)
    with tempfile.TemporaryDirectory(prefix="long-polls-") as folder:
        settings = roomy_settings(Path(folder)).model_copy(update={"lease": LEASE})
        with atelier_up(settings, Path(folder), ATELIER_WAITING_POLLS=str(most)) as server:
            asyncio.run(_measure(settings, server, options))


async def _measure(settings: Settings, server: Server, options: argparse.Namespace) -> None:
    async with open_resources(settings) as resources:
        accounts = [await make_account(resources, number) for number in range(options.accounts)]
        for count in options.polls:
            polls = await claimed_jobs(resources, accounts, count)
            sys.stdout.write("\n".join(await Round(resources, server, polls, options).run()) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"load {os.getloadavg()}, {options}\n")


async def make_account(resources: Resources, number: int) -> Account:
    account = await resources.accounts.create(f"benchmark {number}", plan_a="roomy")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
    return Account(account.id, secret)


async def claimed_jobs(resources: Resources, accounts: Sequence[Account], count: int) -> list[Poll]:
    adapter = (await resources.catalog.all())[0]
    plan = resources.settings.plan_table[Variant.A, "roomy"]

    async def accept(number: int) -> tuple[str, Account]:
        account = accounts[number % len(accounts)]
        caller = Caller(account_id=account.id, account_name="benchmark", key_id="key_x", variant=Variant.A, plan=plan)
        draft = GenerationDraft(
            prompt=f"lighthouse {number}", loras=(LoraUse(adapter.id),), seed=number, interface=Variant.A
        )
        acceptance = await resources.submission.submit(caller, draft)
        return acceptance.job.id, account

    polls: list[Poll] = []
    while len(polls) < count:
        numbers = range(len(polls), min(len(polls) + AT_ONCE, count))
        accepted = dict(await asyncio.gather(*(accept(number) for number in numbers)))
        while leases := await _claim(resources, adapter.sha256):
            polls += [Poll(lease, accepted.pop(lease.job_id)) for lease in leases]
        for job_id, account in accepted.items():  # the service's own generator was quicker
            await resources.queue.cancel(job_id, account_id=account.id)
    return polls


async def _claim(resources: Resources, group: str) -> list[Lease]:
    """Claim as a worker that holds the jobs' LoRA, or they would be left to the generator, which holds it."""
    claims = await resources.queue.claim(
        "benchmark", pool=JobKind.GENERATION, nonce=new_nonce(), resident=[group], limit=AT_ONCE
    )
    return [claim.lease for claim in claims]


class Round:
    """Some polls, held at a time, and what was seen of them."""

    def __init__(
        self, resources: Resources, server: Server, polls: Sequence[Poll], options: argparse.Namespace
    ) -> None:
        self._resources = resources
        self._server = server
        self._polls = polls
        self._options = options
        self._open = asyncio.Semaphore(AT_ONCE)
        self._sent = 0
        self._answers: Counter[str] = Counter()
        self._answered_at: dict[str, float] = {}
        self._other_ms: list[float] = []

    async def run(self) -> list[str]:
        ends, stays = self._polls[::2], self._polls[1::2]
        other = asyncio.create_task(self._poll_without_waiting(self._polls[-1]))
        quiet = self._usage()
        await asyncio.sleep(self._options.held)
        idle, before = self._take_latencies(), self._usage()
        began = time.monotonic()
        waiting = [asyncio.create_task(self._poll(poll)) for poll in self._polls]
        await wait_until(lambda: self._sent == len(self._polls), timeout=OPEN_LIMIT_S)
        while await self._ask_once(self._polls[-1]) > SETTLED_MS:  # the ingress is taking those that were sent before
            pass
        opened_s, opening = time.monotonic() - began, self._take_latencies()
        start = self._usage()
        await asyncio.sleep(self._options.held)
        end, held, early = self._usage(), self._take_latencies(), self._answers.copy()
        ended_at: dict[str, float] = {}
        await self._end(ends, ended_at)
        await asyncio.gather(*waiting)
        answering = self._take_latencies()
        other.cancel()
        with suppress(asyncio.CancelledError):
            await other
        late = [1000 * (self._answered_at[poll.job_id] - ended_at[poll.job_id]) for poll in ends]
        await self._end(stays, {})
        calm, busy = before.shares_since(quiet), end.shares_since(start)
        cpu = [1e6 * (b - a) / len(self._polls) for a, b in zip(calm, busy, strict=True)]
        memory = [(b - a) / 1024 / len(self._polls) for a, b in zip(before.memory, end.memory, strict=True)]
        return [
            f"{len(self._polls)} polls, opened in {opened_s:.1f} s; answered before any job ended: {dict(early)}",
            f"answers: {dict(self._answers)}",
            f"a job's end to its answer, ms: {quantiles(late)}",
            f"processor time a second of a waiting poll, µs: {each_of(self._server, cpu)}",
            f"memory of a waiting poll, kB: {each_of(self._server, memory)}",
            f"connections to Redis: {before.redis_clients} before, {end.redis_clients} held",
            *(
                f"another caller's polls, ms: {name}: {quantiles(times)}"
                for name, times in {"before": idle, "opening": opening, "held": held, "answering": answering}.items()
            ),
        ]

    async def _poll(self, poll: Poll) -> None:
        async with self._open:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            writer.write(_request(poll, f"Prefer: wait={self._options.wait}\r\n"))
            await writer.drain()
            self._sent += 1
        began = time.monotonic()
        try:
            head, record = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._answers[type(error).__name__] += 1
            return
        waited = time.monotonic() - began
        applied = "waited" if f"preference-applied: wait={self._options.wait}\r\n" in head.lower() else "did not wait"
        whole = "whole wait" if waited >= self._options.wait else "less"
        state = record.get("status") or record["error"]["code"]
        self._answers[f"{head[9:12]} {state}, {applied}, {whole}"] += 1
        self._answered_at[poll.job_id] = time.monotonic()
        writer.close()

    async def _ask_once(self, poll: Poll) -> float:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(_request(poll))
        await _answer(reader)
        writer.close()
        return 1000 * (time.monotonic() - began)

    async def _poll_without_waiting(self, poll: Poll) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        while True:
            began = time.monotonic()
            writer.write(_request(poll))
            head, _ = await _answer(reader)
            if head[9:12] != "200":
                raise RuntimeError(head)
            self._other_ms.append(1000 * (time.monotonic() - began))
            await asyncio.sleep(OTHER_EVERY_S)

    async def _end(self, polls: Sequence[Poll], ended_at: dict[str, float]) -> None:
        async def end(poll: Poll) -> None:
            await finish(self._resources, poll.account.id, poll.lease)
            ended_at[poll.job_id] = time.monotonic()

        for first in range(0, len(polls), AT_ONCE):
            await asyncio.gather(*(end(poll) for poll in polls[first : first + AT_ONCE]))

    def _take_latencies(self) -> list[float]:
        taken, self._other_ms = self._other_ms, []
        return taken

    def _usage(self) -> Usage:
        memory = [psutil.Process(pid).memory_info().rss for pid in self._server.pids]
        with redis.Redis.from_url(self._resources.redis_url) as client:
            clients: Any = client.info("clients")
        cpu = [cpu_seconds(pid) for pid in self._server.pids]
        return Usage(time.monotonic(), cpu, memory, clients["connected_clients"] - 1)


def _request(poll: Poll, more: str = "") -> bytes:
    return (
        f"GET /v1/generate/{poll.job_id} HTTP/1.1\r\nHost: benchmark\r\n"
        f"Authorization: Bearer {poll.account.secret}\r\n{more}\r\n"
    ).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = head.lower().split("content-length: ", 1)[1].split("\r\n", 1)[0]
    return head, json.loads(await reader.readexactly(int(length)))


def quantiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "none"
    cuts = statistics.quantiles(values, n=100)
    return f"p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, most {max(values):.1f} ({len(values)})"


def each_of(server: Server, values: Sequence[float]) -> str:
    return ", ".join(f"{title_of(pid)} {value:.2f}" for pid, value in zip(server.pids, values, strict=True))


if __name__ == "__main__":
    main()
