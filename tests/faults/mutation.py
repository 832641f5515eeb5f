"""Plants small defects by meaning, one at a time, for the tests to find.

A comparison is turned, a constant moved, a statement left out, a condition negated. Nothing here quotes the code, so that a
rename breaks no test. The order is shuffled by a fixed seed: a run that ends early has looked everywhere a little.
"""

import ast
import importlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

import pytest

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
"""Not from `tests.support`, which imports modules that are to be imported with a defect."""

SEED = 20261126
HANG_S = 180.0
"""A mutant whose tests take longer than this hangs, which is a way of being found."""
LEAST_FOUND = 0.85
"""Some defects change nothing that anyone could see, such as a bound that no number meets; those of the last whole run are
judged in docs/decisions/0052-mutants-by-meaning.md."""
PROTOCOL: Mapping[str, Sequence[str]] = {
    "serve_app.jobs.queue": ["tests/jobs/test_jobs.py", "tests/jobs/test_jobs_fairness.py"],
    "serve_app.worker.attempt": ["tests/worker/test_attempt.py", "tests/worker/test_worker.py"],
    "serve_app.worker.step_thread": ["tests/worker/test_step_thread.py", "tests/worker/test_worker.py"],
    "serve_app.worker.worker": ["tests/worker/test_claim_loop.py", "tests/worker/test_worker.py"],
}
ENGINE: Mapping[str, Sequence[str]] = {
    "serve_app.engine.scheduler": ["tests/engine/test_scheduler.py", "tests/engine/test_state_machine.py"],
    "serve_app.engine.runner": [
        "tests/engine/test_runner.py",
        "tests/engine/test_engine.py",
        "tests/engine/test_seeds.py",
    ],
    "serve_app.engine.live_runs": ["tests/engine/test_engine.py", "tests/engine/test_aborts.py"],
    "serve_app.engine.engine": [
        "tests/engine/test_engine.py",
        "tests/engine/test_aborts.py",
        "tests/engine/test_state_machine.py",
    ],
    "serve_app.engine.sampler": ["tests/engine/test_sampler.py"],
    "serve_app.engine.adapter_pool": ["tests/engine/test_adapter_pool.py", "tests/engine/test_engine.py"],
}
PARTS = {"protocol": PROTOCOL, "engine": ENGINE}
"""Modules, and the tests that have to notice their defects."""
LUA_TURNED: Mapping[str, str] = {
    "==": "~=", "~=": "==", "<=": "<", ">=": ">", "<": "<=", ">": ">=", "and": "or", "or": "and", "true": "false", "false": "true",
}  # fmt: skip
_LUA_SKIPPED = r"--[^\n]*|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""
_LUA_TOKEN = re.compile(
    rf"(?P<skipped>{_LUA_SKIPPED})|(?P<turned>[=~<>]=|[<>]|\b(?:and|or|true|false)\b)|(?P<number>\b\d+(?:\.\d+)?\b)"
    r"|\b(?:if|elseif)\b(?P<condition>(?:[^\n'\"]|'[^'\n]*')+?)\bthen\b"
)
_LUA_STATEMENT = re.compile(r"^ *(?:redis\.p?call|[a-z_]+)\([^\n]*\)$", re.MULTILINE)
PYTHON_TURNED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LuaMutant:
    """Replaces the characters from `start` to `end` of the script file `name` by `new`."""

    name: str
    text: str
    start: int
    end: int
    new: str

    def rewrite(self, _script: str, whole: str) -> str:
        """Plant the defect in a script that is this file or includes it."""
        return whole.replace(self.text, self.text[: self.start] + self.new + self.text[self.end :])

    def __str__(self) -> str:
        line = self.text.count("\n", 0, self.start) + 1
        return f"{self.name}.lua:{line}: `{self.text[self.start : self.end].strip()}` becomes `{self.new}`"


def lua_mutants(name: str, text: str) -> Iterator[LuaMutant]:
    """Return every defect that can be planted in the script file."""
    at = 0
    while found := _LUA_TOKEN.search(text, at):
        at = found.end()
        if turned := found["turned"]:
            yield LuaMutant(name, text, *found.span("turned"), LUA_TURNED[turned])
        elif number := found["number"]:
            yield LuaMutant(name, text, *found.span("number"), number + "1" if "." in number else str(int(number) + 1))
        elif condition := found["condition"]:
            yield LuaMutant(name, text, *found.span("condition"), f" not ({condition.strip()}) ")
            at = found.start("condition")  # what it compares is mutated, too
    for found in _LUA_STATEMENT.finditer(text):
        if found[0].count("(") == found[0].count(")"):
            yield LuaMutant(name, text, *found.span(), "")


@dataclass(frozen=True, slots=True)
class PythonMutant:
    """The defect at one place of a module, counted in the order in which `_Planter` visits them."""

    module: str
    place: int
    described: str

    def code(self) -> CodeType:
        """Compile the module with the defect."""
        path = source_of(self.module)
        planter = _Planter(self.place)
        tree = ast.fix_missing_locations(planter.visit(ast.parse(path.read_text())))
        return compile(tree, str(path), "exec")

    def __str__(self) -> str:
        return f"{self.module}:{self.described}"


def python_mutants(module: str) -> list[PythonMutant]:
    """Return every defect that can be planted in the module."""
    planter = _Planter(None)
    planter.visit(ast.parse(source_of(module).read_text()))
    return [PythonMutant(module, place, described) for place, described in enumerate(planter.places)]


def source_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


class _Planter(ast.NodeTransformer):
    """Lists the places of a module, and plants a defect at the `wanted` one."""

    def __init__(self, wanted: int | None) -> None:
        self.places: list[str] = []
        self._wanted = wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            if self._is_here(node, f"`{ast.unparse(node)}` is turned"):
                node.ops[index] = PYTHON_TURNED[type(operator)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_here(node, f"`{ast.unparse(node)}`: and, or exchanged"):
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            return ast.Constant(not node.value) if self._is_here(node, f"{node.value} is negated") else node
        if isinstance(node.value, (int, float)):
            return ast.Constant(node.value + 1) if self._is_here(node, f"{node.value} is one more") else node
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._is_here(node, f"`if {ast.unparse(node.test)}` is negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not isinstance(node.value, (ast.Call, ast.Await)):
            return node  # a docstring
        return ast.Pass() if self._is_here(node, f"`{ast.unparse(node)}` is left out") else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return ast.Pass() if self._is_here(node, f"`{ast.unparse(node)}` is left out") else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)  # an annotation is no behaviour
        return node

    def _is_here(self, node: ast.expr | ast.stmt, described: str) -> bool:
        self.places.append(f"{node.lineno}: {described[:120]}")
        return len(self.places) - 1 == self._wanted


class _Planted(MetaPathFinder, Loader):
    """Imports one module with its defect."""

    def __init__(self, mutant: PythonMutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == self._mutant.module else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(source_of(self._mutant.module))
        exec(self._mutant.code(), module.__dict__)


def survives(mutant: PythonMutant | None, tests: Sequence[str]) -> bool:
    """Run the tests over a module with the defect, or with none, and return whether all pass.

    They run in a fork of this process, which has imported the slow libraries and nothing of what the tests look at.
    """
    child = os.fork()
    if child == 0:
        os.setsid()  # so that servers which the tests start end with them
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Planted(mutant))
        os._exit(
            pytest.main(
                [
                    "-x",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-m",
                    "not soak and not ray and not gpu",
                    *tests,
                ]
            )
        )
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        signal.sigtimedwait([signal.SIGCHLD], 0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def shuffled(mutants: Sequence[T]) -> list[T]:
    return random.Random(SEED).sample(mutants, len(mutants))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many defects were planted, and those that no test found."""

    planted: int
    survivors: Sequence[str]

    @property
    def is_good(self) -> bool:
        return len(self.survivors) <= (1 - LEAST_FOUND) * self.planted

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.planted - len(self.survivors)} of {self.planted} planted defects were found", *self.survivors]
        )


def run_for(seconds: float, mutants: Sequence[T], is_missed: Callable[[T], bool]) -> Outcome:
    """Plant one defect after another for so long."""
    ends, planted, survivors = time.monotonic() + seconds, 0, list[str]()
    for mutant in shuffled(mutants):
        if time.monotonic() > ends:
            break
        planted += 1
        if is_missed(mutant):
            survivors.append(str(mutant))
    return Outcome(planted, survivors)


def main(part: str, seconds: str) -> int:
    """Run one part for so long and print what came of it; 1 when more survive than may."""
    for library in ("torch", "diffusers", "transformers", "redis", "pydantic", "fastapi"):
        importlib.import_module(library)
    tests_of = PARTS[part]
    if not survives(None, sorted({test for tests in tests_of.values() for test in tests})):
        raise SystemExit("the tests fail though nothing is planted")
    mutants = [mutant for module in tests_of for mutant in python_mutants(module)]
    outcome = run_for(float(seconds), mutants, lambda mutant: survives(mutant, tests_of[mutant.module]))
    sys.stdout.write(f"{outcome}\n")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
