"""Attacks both ways of starting: hostile requests, calls to all listeners, thousands of slow clients.

It is long, and prints its tables.
"""

import random
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import pytest

from deployments.runtime import runtime_home
from tests.attack.kinds import Kind, kinds
from tests.attack.raw import parse
from tests.attack.serve_run import ServeRun
from tests.attack.test_listeners import listeners
from tests.attack.test_requests import attempt
from tests.attack.test_slow_clients import Callers, held, open_ones, receive_all, sign_in
from tests.deployments.service import Service

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1800)]

SEED = 20_261_123
AT_ONCE = 32
SILENT, HALF_SENT = 4_100, 1_020


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints one line of a table, also when the test passes."""

    def write(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"{line}\n")

    return write


class Target(NamedTuple):
    name: str
    pid: int
    port: int
    secret: str


@pytest.fixture(scope="module", params=["atelier up", "serve run"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A service of its own: the attack uses up its account's plan."""
    home = tmp_path_factory.mktemp("attacked")
    running = Service(home) if request.param == "atelier up" else ServeRun(home)
    try:
        running.start()
        secret = running.ready["keys"]["both"] if isinstance(running, Service) else running.secret
        pid = running.pid if isinstance(running, Service) else running.process.pid
        yield Target(request.param, pid, running.port, secret)
    finally:
        running.end()
        for directory in (running.data_dir, home):
            shutil.rmtree(runtime_home(directory))


def variants(every_kind: list[Kind]) -> Iterable[Kind]:
    """Each kind as it is, torn into pieces that arrive one by one, and with one byte of its head changed."""
    chance = random.Random(SEED)
    yield from every_kind
    complete = [kind for kind in every_kind if not kind.waits]
    for kind in complete:
        text = b"".join(kind.parts)
        cuts = sorted(chance.sample(range(1, len(text)), min(3, len(text) - 1)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        yield replace(kind, name=f"{kind.name}, torn", parts=tuple(pieces))
    for kind in complete:
        text = bytearray(b"".join(kind.parts))
        place = chance.randrange(min(len(text), 300))
        text[place] = chance.randrange(256)
        parts = (bytes(text),)
        yield replace(kind, name=f"{kind.name}, byte {place} changed", parts=parts, is_http=False, statuses=())


def test_a_thousand_hostile_requests(target: Target, show: Callable[[str], None]) -> None:
    every_kind = kinds(f"127.0.0.1:{target.port}", target.secret)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        seen = list(pool.map(lambda kind: attempt(target.port, kind), variants(every_kind)))
    faults = [one for one in seen if one.fault]
    statuses = Counter(answer.status for one in seen for answer in one.answers)
    failures = sum(count for status, count in statuses.items() if status >= 500 and status != 503)
    silent = sum(not one.answers for one in seen)
    show(f"\n{target.name}: {len(seen)} requests of {len(every_kind)} kinds")
    show(f"  answers by status: {dict(sorted(statuses.items()))}")
    show(f"  closed without an answer, not being HTTP: {silent}")
    show(f"  answers outside the contract: {len(faults)}")
    show(f"  of 500 and above, 503 apart: {failures}")
    for one in faults[:20]:
        show(f"    {one.kind.name}: {one.fault}")
    assert len(seen) >= 1_000
    assert len(every_kind) >= 150
    assert not faults


def test_the_table_of_listeners(target: Target, show: Callable[[str], None]) -> None:
    found = sorted({(one.address.removeprefix("::ffff:"), one.kind, one.process) for one in listeners(target.pid)})
    show(f"\n{target.name}: what listens where")
    for address, kind, program in found:
        show(f"  {address:12} {kind:12} {program}")
    assert all(one.is_local for one in listeners(target.pid))


def test_thousands_of_slow_clients(target: Target, show: Callable[[str], None]) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows: list[tuple[str, Callers]] = []

    def measure(name: str, seconds: float = 8) -> None:
        with Callers(target.port, target.secret) as callers:
            time.sleep(seconds)  # a stretch of time is what is measured
        rows.append((name, callers))

    measure("before")
    with held(target.port, SILENT) as silent:
        assert open_ones(silent) == SILENT
        measure(f"{SILENT:,} silent connections")
        time.sleep(5)
        assert open_ones(silent) == 0, "they were closed in time"
    measure("after them")
    with held(target.port, HALF_SENT, sign_in(target.port)) as halves:
        measure(f"{HALF_SENT:,} half-sent sign-ins")
        answers = [parse(receive_all(connection)) for connection in halves]
        assert [answer.status for (answer,) in answers] == [408] * HALF_SENT
    measure("after them")
    show(f"\n{target.name}: other callers meanwhile\n  {'':32} {'calls':>6} {'p50 ms':>7} {'p99 ms':>7} {'failed':>7}")
    for name, callers in rows:
        p50, p99 = (1000 * callers.percentile(share) for share in (0.5, 0.99))
        show(f"  {name:32} {len(callers.seconds):6} {p50:7.0f} {p99:7.0f} {len(callers.failures):7}")
    assert not any(callers.failures for _, callers in rows)
