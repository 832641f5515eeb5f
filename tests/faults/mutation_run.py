"""Plants defects of the job protocol's or the engine's code, one at a time, and runs the tests that should find them.

`python -m tests.faults.mutation_run protocol 240` plants for 240 s. The tests run once with nothing planted, which records
which of them execute which lines; a defect then meets the fastest of those that execute its line. The order is shuffled
by a fixed seed: a run that ends early has looked everywhere a little.
"""

import importlib
import os
import pickle
import random
import signal
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import accumulate
from resource import RLIMIT_CPU, setrlimit
from tempfile import TemporaryFile
from types import ModuleType
from typing import NamedTuple, TypeVar

import coverage
import pytest

from tests.faults.mutation import PythonMutant, python_mutants, source_of

T = TypeVar("T")

SEED = 20261126
TESTS_S = 8.0
"""A defect meets tests that take at most this long together while nothing is planted."""
PROCESSOR_S = 60
"""Tests that use more of the processor than this run in a circle, which is a way of being found."""
HANG_S = 240.0
"""Tests that do not end within this time, however busy the machine is, wait for what never comes."""
LEAST_FOUND = 0.85
"""Some defects change nothing that anyone could see, such as a bound that no number meets; those of the last whole run
are judged in docs/decisions/0052-mutants-by-meaning.md."""


class Part(NamedTuple):
    """Modules, and the tests that have to notice their defects."""

    modules: Sequence[str]
    tests: Sequence[str]


PARTS: Mapping[str, Part] = {
    "protocol": Part(
        (
            "serve_app.jobs.queue",
            "serve_app.worker.attempt",
            "serve_app.worker.step_thread",
            "serve_app.worker.worker",
        ),
        (
            "tests/jobs/test_jobs.py",
            "tests/jobs/test_jobs_fairness.py",
            "tests/worker/test_attempt.py",
            "tests/worker/test_claim_loop.py",
            "tests/worker/test_step_thread.py",
            "tests/worker/test_worker.py",
        ),
    ),
    "engine": Part(
        (
            "serve_app.engine.scheduler",
            "serve_app.engine.runner",
            "serve_app.engine.live_runs",
            "serve_app.engine.engine",
            "serve_app.engine.sampler",
            "serve_app.engine.adapter_pool",
        ),
        (
            "tests/engine/test_aborts.py",
            "tests/engine/test_adapter_pool.py",
            "tests/engine/test_engine.py",
            "tests/engine/test_runner.py",
            "tests/engine/test_sampler.py",
            "tests/engine/test_scheduler.py",
            "tests/engine/test_seeds.py",
            "tests/engine/test_state_machine.py",
        ),
    ),
}


class _Planted(MetaPathFinder, Loader):
    """Imports one module with its defect."""

    def __init__(self, mutant: PythonMutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == self._mutant.module else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(source_of(self._mutant.module))
        exec(self._mutant.code(), module.__dict__)


class Coverage(NamedTuple):
    """What the tests do while nothing is planted."""

    seconds: Mapping[str, float]
    """How long each test function takes."""
    lines: Mapping[str, Mapping[int, Sequence[str]]]
    """The test functions that execute a line, by module and line; none for a line that an import executes."""
    libraries: Sequence[str]
    """The modules of others that they import."""

    def tests_of(self, mutant: PythonMutant) -> list[str]:
        """Return the fastest of the tests that execute the mutant's line, as many as `TESTS_S` holds and at least one."""
        lines = self.lines[mutant.module]
        at = max((line for line in lines if line <= mutant.line), default=None)  # a statement may have several lines
        tests = (lines[at] if at is not None else ()) or {test for tests in lines.values() for test in tests}
        ordered = sorted(tests, key=self.seconds.__getitem__)
        total = list(accumulate(self.seconds[test] for test in ordered))
        return ordered[: max(1, bisect_right(total, TESTS_S))]


class _Recorder:
    """Records, as a pytest plugin, which test functions execute which lines."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._paths = {module: str(source_of(module)) for module in modules}
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=list(self._paths.values()))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._coverage.start()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._coverage.switch_context(_function(item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._seconds[_function(report.nodeid)] += report.duration

    def recorded(self) -> Coverage:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {
            module: {line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(path).items()}
            for module, path in self._paths.items()
        }
        libraries = [
            name
            for name, module in sys.modules.items()
            if "site-packages" in str(getattr(module, "__file__", "")) and not name.startswith(("_pytest", "ray"))
        ]
        return Coverage(self._seconds, lines, libraries)


def _function(node_id: str) -> str:
    return node_id.partition("[")[0]


def _run_tests(tests: Sequence[str], *plugins: object) -> int:
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not soak and not ray and not gpu"]
    return pytest.main([*options, *tests], plugins=plugins)


def covered(part: Part) -> Coverage:
    """Run the part's tests in another process with nothing planted.

    Raises `SystemExit` when one fails.
    """
    with TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            recorder = _Recorder(part.modules)
            status = _run_tests(part.tests, recorder)
            answer.write(pickle.dumps(recorder.recorded()))
            answer.flush()
            os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit("the tests fail though nothing is planted")
        answer.seek(0)
        return pickle.load(answer)


class Verdict(StrEnum):
    FOUND = "found"
    HUNG = "hung"
    """The tests did not end: the defect counts as found, and is listed."""
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of each defect that was planted."""

    verdicts: Mapping[str, Verdict]

    @property
    def is_good(self) -> bool:
        return self._survived <= (1 - LEAST_FOUND) * len(self.verdicts)

    @property
    def _survived(self) -> int:
        return list(self.verdicts.values()).count(Verdict.SURVIVED)

    def __str__(self) -> str:
        unseen = sorted(f"{verdict}: {name}" for name, verdict in self.verdicts.items() if verdict is not Verdict.FOUND)
        planted = len(self.verdicts)
        return "\n".join([f"{planted - self._survived} of {planted} planted defects were found", *unseen])


def shuffled(mutants: Sequence[T]) -> list[T]:
    return random.Random(SEED).sample(mutants, len(mutants))


def plant(mutant: PythonMutant, tests: Sequence[str]) -> int:
    """Start the tests over a module with the defect and return their process.

    It is a fork of this one, which has imported the libraries and nothing of what the tests look at.
    """
    child = os.fork()
    if child != 0:
        return child
    os.setsid()  # so that servers which the tests start end with them
    setrlimit(RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.meta_path.insert(0, _Planted(mutant))
    os._exit(_run_tests(tests))


def run_for(seconds: float, mutants: Sequence[PythonMutant], recorded: Coverage) -> Outcome:
    """Plant the defects for so long, as many at a time as there are cores."""
    ends = time.monotonic() + seconds
    waiting, running, verdicts = shuffled(mutants), dict[int, tuple[str, float]](), dict[str, Verdict]()
    while running or (waiting and time.monotonic() < ends):
        while waiting and len(running) < (os.cpu_count() or 1) and time.monotonic() < ends:
            mutant = waiting.pop()
            running[plant(mutant, recorded.tests_of(mutant))] = (str(mutant), time.monotonic() + HANG_S)
        signal.sigtimedwait([signal.SIGCHLD], 0.1)
        for child, (name, deadline) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and time.monotonic() < deadline:
                continue
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if not ended:
                os.waitpid(child, 0)
            verdicts[name] = Verdict.HUNG if not ended else Verdict.FOUND if status else Verdict.SURVIVED
            del running[child]
    return Outcome(verdicts)


def main(name: str, seconds: str) -> int:
    """Run one part for so long and print what came of it; 1 when more survive than may."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    part = PARTS[name]
    recorded = covered(part)
    for library in recorded.libraries:
        with suppress(Exception):  # some can only be imported by another
            importlib.import_module(library)
    mutants = [mutant for module in part.modules for mutant in python_mutants(module)]
    outcome = run_for(float(seconds), mutants, recorded)
    sys.stdout.write(f"{outcome}\n")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
