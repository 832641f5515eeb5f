"""Processes of the service are killed and frozen under load; every acknowledged job is accounted for, and its end told.

`CHAOS_SECONDS=90 .venv/bin/python -m pytest -m soak tests/faults/test_chaos.py -s` shows a short one.
"""

import asyncio
import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from serve_app.domain.jobs import Job
from tests import processes
from tests.composition import Resources, open_resources
from tests.faults.load import Callers, say
from tests.faults.reconciliation import audit_service, records_of, states
from tests.faults.service import Service
from tests.support import wait_until
from tests.webhooks.receiver import CheckingReceiver, listening

SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
SEED = int(os.environ.get("CHAOS_SEED", "20261121"))
LEASE_S = 10
SETTLE_LIMIT_S = 300.0
"""For what was accepted before the last kill: its lease, its retries, and the queue."""
ACCEPTING_LIMIT_S = 120.0
"""After any one fault, requests must be accepted again by then; on a quiet machine it is seconds."""
POWER_CUTS = 3 if SECONDS >= 300 else 1
"""So often everything is killed and started again."""
FROZEN = ("frozen generator", "frozen ingress", "frozen upscaler", "frozen housekeeper")
"""They stay so, until Serve replaces them."""
REPLACED_LIMIT_S = 75.0
"""For a frozen replica: a controller that is killed meanwhile counts failed checks again."""
FAULTS = (
    *["generator"] * 4,
    *["ingress"] * 3,
    *["redis"] * 3,
    *["paused generator"] * 2,
    *["paused redis"] * 2,
    *FROZEN,
    *("upscaler", "housekeeper", "controller", "proxy", "haproxy", "haproxy manager"),
)


class Chaos:
    """Kills one part after the other, and records what it did."""

    def __init__(self, service: Service, callers: Callers, rnd: random.Random) -> None:
        self._service = service
        self._callers = callers
        self._rnd = rnd
        self.killed: Counter[str] = Counter()
        self.recovery: dict[str, list[float]] = {}
        self.hits: list[str] = []
        self.replaced: dict[str, list[float]] = {}
        self._next: list[str] = []
        """Each of the faults once, in whatever order, then again."""
        self._frozen: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            await asyncio.sleep(self._rnd.uniform(3, 9))
            if passed > seconds * (self.killed["everything"] + 1) / (POWER_CUTS + 1):
                await self._power_cut()
            else:
                self._next = self._next or self._rnd.sample(FAULTS, len(FAULTS))
                await self._fault(self._next.pop())
            self._show(passed, seconds)
        await asyncio.gather(*self._frozen)

    async def _fault(self, part: str) -> None:
        pids = self._pids(part)
        if not pids:
            return
        pid = self._rnd.choice(pids)
        if part.startswith(("frozen ", "paused ")):
            os.kill(pid, signal.SIGSTOP)
            self._frozen.add(asyncio.create_task(self._replaced(part, pid) if part in FROZEN else _thaw(pid)))
        elif not processes.kill(pid):
            return
        self.killed[part] += 1
        await self._until_accepting(part)

    def _pids(self, part: str) -> list[int]:
        return self._service.pids(part.removeprefix("frozen ").removeprefix("paused "))

    async def _replaced(self, part: str, pid: int) -> None:
        began = time.monotonic()
        await wait_until(lambda: not processes.is_alive(pid), timeout=REPLACED_LIMIT_S)
        self.replaced.setdefault(part, []).append(time.monotonic() - began)

    async def _power_cut(self) -> None:
        self.hits += canary_hits(self._service, self._callers)  # a new start clears the logs
        self._service.kill_everything()
        self.killed["everything"] += 1
        await self._service.start()
        await self._until_accepting("everything")

    async def _until_accepting(self, part: str) -> None:
        """A caller who asks right after the fault: how long until that request is accepted."""
        async with asyncio.timeout(ACCEPTING_LIMIT_S):
            self.recovery.setdefault(part, []).append(await self._callers.probe())

    def _show(self, passed: float, seconds: float) -> None:
        seen = self._callers.seen
        say(
            f"\r{passed:5.0f} of {seconds:.0f} s · killed {self.killed.total()} · accepted {len(self._callers.acknowledged.all)}"
            f" · ended {len(seen.ends)} · unfinished {self._callers.unfinished}   "
        )


async def _thaw(pid: int) -> None:
    await asyncio.sleep(LEASE_S + 3)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.ray
async def test_nothing_accepted_is_lost_or_told_as_two_ends_while_processes_are_killed_and_frozen(
    service: Service,
) -> None:
    service.environment["ATELIER_WEBHOOK_NETWORKS"] = "127.0.0.0/8"
    await service.start()
    canary = f"a lighthouse and a {secrets.token_hex(8)} canary"
    callers = await Callers.of(service.settings, service.base_url, prompt=canary, seed=SEED)
    chaos = Chaos(service, callers, random.Random(SEED))
    accepted = callers.acknowledged
    async with listening(CheckingReceiver()) as receiver:
        receiver.secret = await callers.add_webhook(receiver.url())
        calling = asyncio.create_task(callers.run())
        try:
            await chaos.run(SECONDS)
            callers.stop.set()
            began = time.monotonic()
            await asyncio.wait({calling}, timeout=SETTLE_LIMIT_S)
            settled = time.monotonic() - began
        finally:
            calling.cancel()
        with suppress(TimeoutError):
            await wait_until(lambda: not receiver.untold(accepted.all), timeout=SETTLE_LIMIT_S)
    hits = chaos.hits + canary_hits(service, callers)
    await service.stop()
    async with open_resources(service.settings) as resources:
        problems = [*await audit_service(resources, accepted), *receiver.problems(accepted.all)]
        records = await records_of(resources, accepted.all)
        problems += _as_callers_saw(resources, callers, records)
        count = dict(await resources.queue_stats.counts())
    report = {
        "seconds": SECONDS,
        "accepted": len(accepted.all),
        "states": states(records),
        "attempts": dict(sorted(Counter(job.attempt for job in records.values()).items())),
        "downloaded": len(callers.seen.digests),
        "told": len(receiver.attempts),
        "attempts_to_tell": dict(sorted(Counter(max(each.values()) for each in receiver.attempts.values()).items())),
        "killed": dict(chaos.killed),
        "accepting_after_s": {part: _spread(times) for part, times in chaos.recovery.items()},
        "replaced_after_s": {part: _spread(times) for part, times in chaos.replaced.items()},
        "settled_s": round(settled, 1),
        "answers": dict(callers.seen.answers),
        "count": count,
        "not_ours": dict(callers.seen.not_ours),
        "surprises": callers.seen.surprises,
        "canary_hits": hits,
        "problems": problems,
    }
    say("\n" + json.dumps(report, indent=2) + "\n")
    assert not problems
    assert not hits
    assert not callers.seen.double
    assert not callers.seen.surprises
    assert not callers.seen.not_ours, "answers outside the contract's envelope"


def canary_hits(service: Service, callers: Callers) -> list[str]:
    """Return the service's files, Redis's own data excepted, that hold the caller's key or prompt."""
    canaries = [text.encode() for text in callers.canaries]
    folders = (service.data_dir, service.runtime_home, service.log.parent)
    files = {path for folder in folders for path in _files_below(folder)}
    own_data = service.data_dir / "redis"
    found = [path for path in files if path.parent != own_data or path.suffix == ".log"]
    return [str(path) for path in sorted(found) if any(canary in path.read_bytes() for canary in canaries)]


def _files_below(folder: Path) -> Iterator[Path]:
    return (path.resolve() for path in folder.rglob("*") if path.is_file() and not path.is_socket())


def _as_callers_saw(resources: Resources, callers: Callers, records: Mapping[str, Job]) -> list[str]:
    """An end that was seen is the end that is recorded, and a download is what was committed."""
    committed = {resources.images.name(i.image_uri): i.sha256 for job in records.values() for i in job.images}
    problems = [
        f"{name}: downloaded bytes differ from the record"
        for name, digest in callers.seen.digests.items()
        if committed.get(name) != digest
    ]
    for job_id, status in callers.seen.ends.items():
        recorded = records[job_id].state if job_id in records else "nothing"
        if status == "completed" != recorded:
            problems.append(f"{job_id}: seen {status}, recorded {recorded}")
    return problems


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"n": len(ordered), "median": round(ordered[len(ordered) // 2], 2), "max": round(ordered[-1], 2)}
