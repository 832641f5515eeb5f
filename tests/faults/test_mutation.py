"""The tests notice small defects in the job protocol, its scripts and the engine's core."""

import subprocess
import sys

import pytest

from tests.faults.mutation import lua_mutants, python_mutants
from tests.faults.mutation_run import PARTS
from tests.support import ROOT

RUN_S = 480.0
"""The three parts, and their tests with nothing planted, take half an hour."""


def test_every_kind_of_lua_defect_is_planted() -> None:
    text = "-- a < b\nif a == 'x < y' and n > 4 then\n  redis.call('DEL', K('a'))\nend\n"
    condition = "a == 'x < y' and n > 4"
    assert {
        f"{text[found.start : found.end].strip()} to {found.new.strip()}" for found in lua_mutants("a/b", text)
    } == {
        f"{condition} to not ({condition})",
        "== to ~=",
        "and to or",
        "> to >=",
        "4 to 5",
        "redis.call('DEL', K('a')) to ",
    }


@pytest.mark.parametrize("module", [module for part in PARTS.values() for module in part.modules])
def test_every_kind_of_python_defect_is_planted(module: str) -> None:
    mutants = python_mutants(module)
    kinds = {mutant.described.split("`")[-1].strip() for mutant in mutants}
    assert {"is turned", "is left out", "is negated"} <= kinds
    first, second = mutants[0].code(), mutants[1].code()
    assert first != second


@pytest.mark.soak
@pytest.mark.timeout(RUN_S + 900)
@pytest.mark.parametrize("part", PARTS)
def test_defects_are_found(part: str, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "tests.faults.mutation_run", part, str(RUN_S)]  # it forks, so no thread may run
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    pytestconfig.get_terminal_writer().line(f"\n{done.stdout}{done.stderr[-2000:]}")
    assert done.returncode == 0
