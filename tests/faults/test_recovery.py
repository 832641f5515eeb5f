"""Shows what callers notice of a killed or frozen process, and when it is replaced.

`.venv/bin/python -m pytest -m soak -n 0 -s --timeout 3600 tests/faults/test_recovery.py` prints a row for each fault.
"""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import pytest

from tests import processes
from tests.faults.load import Call, Callers, say
from tests.faults.service import Service
from tests.support import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.ray]

REPLICAS = ("ingress", "generator", "upscaler", "housekeeper")
PARTS = (*REPLICAS, "haproxy", "haproxy manager", "proxy", "controller", "redis")
REPLACED_S = 30.0
"""The replacement of a frozen replica has begun within this many seconds."""
PATIENCE_S = float(os.environ.get("RECOVERY_PATIENCE", "60"))
"""How long the end and the successor of a process are waited for; a frozen one then goes on."""
QUIET_S = 6.0
"""How long before and after a fault callers notice nothing."""
MOMENT_S = 2.0
SETTLE_LIMIT_S = 180.0
HEAD = (
    "| fault | replacement begun after s | gone after s | successor at work after s | last call that noticed after s "
    "| polls p99 ms before | during | after | accepts p99 ms before | during | after | failed | of calls |"
)
BUSY, LOADED_S = int(os.environ.get("BUSY", "30")), float(os.environ.get("BUSY_SECONDS", "180"))
"""Processes that use all the time they get, beside the service, and for how long."""


@dataclass(frozen=True, slots=True)
class Row:
    """One fault: when the process was gone and its successor there, and the calls around it."""

    fault: str
    begun_s: float | None
    """When the process was gone, or another of its part was there, starting or at work."""
    gone_s: float | None
    back_s: float | None
    unserved_s: float
    """When the last call was made that failed or took long."""
    calls: tuple[list[Call], list[Call], list[Call]]
    """Before, during and after."""

    def __str__(self) -> str:
        cells = [
            self.fault,
            _seconds(self.begun_s),
            _seconds(self.gone_s),
            _seconds(self.back_s),
            f"{self.unserved_s:.1f}",
        ]
        for method in ("GET", "POST"):
            cells += [_p99([call for call in calls if call.method == method]) for calls in self.calls]
        failed = Counter(str(call.status or "no answer") for call in self.calls[1] if (call.status or 999) >= 400)
        cells.append(", ".join(f"{count} × {answer}" for answer, count in sorted(failed.items())) or "0")
        cells.append(str(len(self.calls[1])))
        return f"| {' | '.join(cells)} |"


@pytest.fixture
async def callers(service: Service) -> Callers:
    await service.start()
    return await Callers.of(service.settings, service.base_url, call_limit_s=PATIENCE_S)


@pytest.mark.parametrize(("service", "parts"), [(2, PARTS), (1, ("ingress",))], indirect=["service"])
async def test_a_dead_or_frozen_process_is_replaced_and_others_go_on(
    service: Service, callers: Callers, parts: Sequence[str]
) -> None:
    """On a service of two ingresses and generators, and on one with one of each."""
    rows: list[Row] = []
    say(f"\n{HEAD}\n{'|---' * HEAD.count(' | ')}|---|\n")
    async with _running(callers.run_steadily(), callers):
        for part in parts:
            for name, number in {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}.items():
                if (part, number) != ("redis", signal.SIGSTOP):
                    rows.append(await _row(service, callers, part, f"{name} of {part}", number))
                    say(f"{rows[-1]}\n")
    say(f"load {os.getloadavg()}\n")
    late = [row.fault for row in rows if row.fault.endswith(REPLICAS) and (row.begun_s or PATIENCE_S) > REPLACED_S]
    assert not late
    assert not callers.seen.not_ours, "answers outside the contract's envelope"
    assert not callers.seen.surprises


async def test_no_process_is_replaced_on_a_busy_machine(service: Service, callers: Callers) -> None:
    pids = {part: service.pids(part, at_work=True) for part in PARTS if part != "haproxy"}
    async with _running(callers.run(), callers):
        with _busy_machine():
            await asyncio.sleep(LOADED_S)  # that nothing happens shows after a time only
            load = os.getloadavg()
            found = {part: service.pids(part, at_work=True) for part in pids}
    say(f"load {load}; answers {dict(callers.seen.answers)}; jobs ended {len(callers.seen.ends)}\n")
    say("".join(f"{line}\n" for line in _doubts(service)))
    assert found == pids


async def _row(service: Service, callers: Callers, part: str, fault: str, number: signal.Signals) -> Row:
    await wait_until(lambda: _is_quiet(service, callers), timeout=SETTLE_LIMIT_S)
    known = service.pids(part, at_work=True)
    began = time.monotonic()
    os.kill(known[0], number)
    starting = set(service.pids(part))
    begun_s = await _seconds_until(
        lambda: not processes.is_alive(known[0]) or not starting.issuperset(service.pids(part)),
        since=began,
    )
    gone_s = await _seconds_until(lambda: not processes.is_alive(known[0]), since=began)
    back_s = await _successor_after(service, part, known, since=began)
    if gone_s is None:
        os.kill(known[0], signal.SIGCONT)
    ended = time.monotonic()
    await asyncio.sleep(QUIET_S)
    await wait_until(lambda: _is_quiet(service, callers), timeout=SETTLE_LIMIT_S)
    calls = callers.seen.calls
    unusual = [call.begun - began for call in calls if call.begun > began and not call.is_usual]
    unserved_s = max(unusual, default=0.0)
    ended = max(ended, began + unserved_s)
    before = [call for call in calls if began - QUIET_S < call.begun < began]
    during = [call for call in calls if began < call.begun <= ended]
    after = [call for call in calls if ended < call.begun]
    return Row(fault, begun_s, gone_s, back_s, unserved_s, (before, during, after))


def _is_quiet(service: Service, callers: Callers) -> bool:
    """Whether every part is there, and nobody has noticed anything for a while."""
    now, seen = time.monotonic(), callers.seen
    recent = [call for call in seen.calls[-1000:] if call.begun > now - QUIET_S]
    waits = any(begun < now - 1 for begun in seen.open)
    served = bool(recent) and min(call.begun for call in recent) < now - QUIET_S + 1
    return (
        served
        and not waits
        and all(call.is_usual for call in recent)
        and all(service.pids(p, at_work=True) for p in PARTS)
    )


async def _successor_after(service: Service, part: str, known: Sequence[int], *, since: float) -> float | None:
    """A starting replica has the title of one at work for less than a moment, between two calls."""
    while True:
        found_s = await _seconds_until(lambda: not set(known).issuperset(service.pids(part, at_work=True)), since=since)
        await asyncio.sleep(MOMENT_S)
        if found_s is None or not set(known).issuperset(service.pids(part, at_work=True)):
            return found_s


async def _seconds_until(condition: Callable[[], bool], *, since: float) -> float | None:
    with suppress(TimeoutError):
        await wait_until(condition, timeout=max(0.1, since + PATIENCE_S - time.monotonic()))
        return time.monotonic() - since
    return None


@asynccontextmanager
async def _running(calls: Coroutine[None, None, None], callers: Callers) -> AsyncGenerator[None]:
    task = asyncio.create_task(calls)
    try:
        yield
    finally:
        callers.stop.set()
        await asyncio.wait({task}, timeout=SETTLE_LIMIT_S)
        task.cancel()


@contextmanager
def _busy_machine() -> Generator[None]:
    """Each in a session of its own, as another program is: Linux shares its time between sessions first."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, start_new_session=True) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _doubts(service: Service) -> list[str]:
    """What Serve's controller says of checks that failed or took too long."""
    logs = (service.runtime_home / "ray" / "session_latest" / "logs" / "serve").glob("controller_*.log")
    return [
        line for log in logs for line in log.read_text().splitlines() if "health check" in line and "WARNING" in line
    ]


def _p99(calls: Sequence[Call]) -> str:
    times = [1000 * call.seconds for call in calls]
    return f"{statistics.quantiles(times, n=100, method='inclusive')[98]:.0f}" if len(times) > 1 else "–"


def _seconds(value: float | None) -> str:
    return f"not in {PATIENCE_S:.0f}" if value is None else f"{value:.1f}"
