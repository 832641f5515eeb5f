"""Plants defects, one at a time, and runs the tests that should find them.

`python -m tests.faults.mutation_run engine 240` does so for the engine and 240 s. The tests are collected once. They run
with nothing planted, which records what each executes; then each defect is planted in a fork of this process and meets
the fastest of the tests that execute its place. The order is shuffled by a fixed seed: a run that ends early has looked
everywhere a little.
"""

import os
import pickle
import random
import signal
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from resource import RLIMIT_CPU, setrlimit
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import coverage
import pytest

from tests.faults.mutation import PythonMutant, python_mutants, source_of

T = TypeVar("T")

SEED = 20261126
TESTS_S = 12.0
"""A defect meets tests that take at most this much of the processor together while nothing is planted."""
PROCESSOR_S = 60
"""Tests that use more of the processor than this run in a circle, which is a way of being found."""
HANG_S = 180.0
"""Tests that do not end within this time, however busy the machine is, wait for what never comes."""
LEAST_FOUND = 0.7
"""Some defects change nothing that anyone could see, such as a bound that no number meets. The shares that were seen, and
what survived, are in docs/decisions/tests.md."""
NOT_PLANTED = 99
"""A status of no test run."""


class Part(NamedTuple):
    """Modules, and the tests that have to notice their defects."""

    modules: Sequence[str]
    tests: Sequence[str]


def shuffled(mutants: Sequence[T]) -> list[T]:
    return random.Random(SEED).sample(mutants, len(mutants))


def _named(prefix: str, names: str) -> list[str]:
    return [prefix + name for name in names.split()]


PARTS: Mapping[str, Part] = {
    "protocol": Part(
        modules=[
            "serve_app.jobs.queue",
            *_named("serve_app.worker.", "attempt step_thread worker"),
        ],
        tests=[
            *_named("tests/jobs/", "test_jobs.py test_jobs_fairness.py test_moderation.py test_previews.py"),
            *_named("tests/worker/", "test_attempt.py test_claim_loop.py test_step_thread.py test_worker.py"),
        ],
    ),
    "engine": Part(
        modules=_named("serve_app.engine.", "scheduler runner live_runs engine sampler adapter_pool"),
        tests=[
            *_named("tests/engine/", "test_aborts.py test_adapter_pool.py test_engine.py test_runner.py"),
            *_named("tests/engine/", "test_sampler.py test_scheduler.py test_seeds.py test_previews.py"),
            *_named("tests/engine/", "test_batch_invariance.py test_lanes.py test_parity.py test_device_queues.py"),
        ],
    ),
}


class Record(NamedTuple):
    """What the tests do while nothing is planted."""

    seconds: Mapping[str, float]
    """How much of the processor each test takes."""
    lines: Mapping[str, Mapping[int, Sequence[str]]]
    """The tests that execute a line, by module and line."""

    def tests_of(self, mutant: PythonMutant) -> list[str]:
        """Return tests that execute the defect, the fastest of each file in turn, while `TESTS_S` holds them."""
        chosen: list[tuple[int, float, str]] = []
        place = defaultdict[str, int](int)
        for test in sorted(self._executing(mutant), key=self.seconds.__getitem__):
            file = test.partition("::")[0]
            chosen.append((place[file], self.seconds[test], test))
            place[file] += 1
        chosen.sort()
        total = list(accumulate(seconds for _, seconds, _ in chosen))
        return [test for _, _, test in chosen[: max(1, bisect_right(total, TESTS_S))]]

    def _executing(self, mutant: PythonMutant) -> set[str]:
        lines = self.lines[mutant.module]
        first = max((line for line in lines if mutant.function <= line <= mutant.line), default=0)
        return set(lines.get(first, ()))  # a place may be in a later line of its statement, which is not recorded


class _Recorder:
    """Records, as a pytest plugin, what each test executes."""

    def __init__(self, part: Part, answer: Path) -> None:
        self._paths = {module: str(source_of(module)) for module in part.modules}
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=list(self._paths.values()))
        self._answer = answer
        self._seconds: dict[str, float] = {}
        self._coverage.start()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._coverage.switch_context(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        began = time.process_time()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.process_time() - began

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {
            module: {line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(path).items()}
            for module, path in self._paths.items()
        }
        self._answer.write_bytes(pickle.dumps(Record(self._seconds, lines)))


class Verdict(StrEnum):
    FOUND = "found"
    HUNG = "hung"
    """The tests did not end: the defect counts as found, and is listed."""
    SURVIVED = "survived"
    UNTESTED = "survived, and no test executes it"


class Outcome(NamedTuple):
    """What came of each defect that was planted."""

    verdicts: Mapping[str, Verdict]
    places: int

    @property
    def is_good(self) -> bool:
        return len(self.verdicts) > 0 and self.found >= LEAST_FOUND * len(self.verdicts)

    @property
    def found(self) -> int:
        return sum(verdict in (Verdict.FOUND, Verdict.HUNG) for verdict in self.verdicts.values())

    def __str__(self) -> str:
        unseen = sorted(f"{verdict}: {name}" for name, verdict in self.verdicts.items() if verdict is not Verdict.FOUND)
        head = f"{self.found} of {len(self.verdicts)} planted defects were found; there are {self.places} places"
        return "\n".join([head, *unseen])


class _Planting:
    """Plants the defects, as a pytest plugin, where pytest would run the tests that it collected."""

    def __init__(self, part: Part, seconds: float, folder: Path) -> None:
        self._part = part
        self._seconds = seconds
        self._folder = folder
        self.outcome = Outcome({}, 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Return None in a fork, in which pytest goes on with the tests that are left to it."""
        answer = self._folder / "record"
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            session.config.pluginmanager.register(_Recorder(self._part, answer))
            return None
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit("the tests fail though nothing is planted")
        record: Record = pickle.loads(answer.read_bytes())
        mutants = shuffled([found for module in self._part.modules for found in python_mutants(module)])
        ends = time.monotonic() + self._seconds
        running, verdicts = dict[int, tuple[str, float]](), dict[str, Verdict]()
        waiting = iter(mutants)
        while True:
            has_room = len(running) < (os.cpu_count() or 1) and time.monotonic() < ends
            if has_room and (mutant := next(waiting, None)):
                tests = record.tests_of(mutant)
                if not tests:
                    verdicts[str(mutant)] = Verdict.UNTESTED
                elif child := os.fork():
                    running[child] = (str(mutant), time.monotonic() + HANG_S)
                else:
                    self._plant(mutant, tests, session)
                    return None
                continue
            if not running:
                break
            signal.sigtimedwait([signal.SIGCHLD], 0.05)
            for child, (name, deadline) in list(running.items()):
                if verdict := _verdict(child, deadline):
                    verdicts[name] = verdict
                    del running[child]
        self.outcome = Outcome(verdicts, len(mutants))
        return True

    def _plant(self, mutant: PythonMutant, tests: Sequence[str], session: pytest.Session) -> None:
        os.setsid()  # so that servers which the tests start end with them
        setrlimit(RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
        try:
            mutant.plant()
        except Exception as failed:  # noqa: BLE001 - whatever it is, no test has run
            sys.stderr.write(f"{mutant}: {failed!r}\n")
            os._exit(NOT_PLANTED)
        items = {item.nodeid: item for item in session.items}
        session.items[:] = [items[test] for test in tests]
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)


def _verdict(child: int, deadline: float) -> Verdict | None:
    """Return what came of a run of tests; None while it lasts."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended and time.monotonic() < deadline:
        return None
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return Verdict.HUNG
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_PLANTED:
        raise SystemExit("a defect could not be planted")
    return Verdict.FOUND if status else Verdict.SURVIVED


def main(part: str, seconds: str) -> int:
    """Run one part for that time and print what came of it; 1 when more survive than may."""
    mother = os.getpid()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with TemporaryDirectory() as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        planting = _Planting(PARTS[part], float(seconds), Path(folder))
        options = ["-x", "-q", "-s", "-p", "no:cacheprovider", "--disable-warnings"]
        chosen = ["-m", "not soak and not ray and not gpu"]
        status = pytest.main([*options, *chosen, *PARTS[part].tests], plugins=[planting])
        if os.getpid() != mother:
            os._exit(status)
    sys.stdout.write(f"{planting.outcome}\n")
    return 0 if planting.outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
