"""The tests notice small defects in the job protocol, its scripts and the engine's core."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from serve_app.domain.errors import AtelierError
from serve_app.jobs.queue import Fairness
from tests.accounts.auth_scenario import run_auth_scenario
from tests.faults.mutation import LuaMutant, lua_mutants, python_mutants
from tests.faults.mutation_run import PARTS, Outcome, Verdict, shuffled
from tests.jobs.job_model import run_model
from tests.jobs.logical_queue import LogicalQueue, model_settings, roomy_settings
from tests.jobs.scenarios import SCENARIOS, Scenario
from tests.support import ROOT

DEFECTS = (AssertionError, ResponseError, AtelierError, TypeError, ValueError, KeyError, IndexError)
"""A planted defect shows itself as a broken promise, a script that stops, or an answer that makes no sense."""
SEEDS = range(12)
RUN_S = 480.0
"""The three parts, and their tests with nothing planted, take half an hour."""
AUTH_SCRIPTS = ("window", "caller", "poll", "api_key", "create_key", "roll_key", "limit_key")
"""The scenario of authentication has to notice defects of these scripts."""
JOB_SCRIPTS = (
    "queue", "end_attempt", "accept", "claim", "owners", "heartbeat", "finish", "fail", "release", "reap",
    "cancel", "requeue_dead",
)  # fmt: skip
"""Scenarios and runs of the model have to notice defects of these scripts."""

FILES = {path.stem: path for path in (ROOT / "serve_app").glob("*/scripts/*.lua")}


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
@pytest.mark.script_text
@pytest.mark.timeout(RUN_S + 300)
def test_defects_of_the_scripts_are_found(redis_url: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert asyncio.run(_finding(None, redis_url, tmp_path)) is None, "nothing is planted"
    mutants = [
        mutant for name in (*JOB_SCRIPTS, *AUTH_SCRIPTS) for mutant in lua_mutants(name, FILES[name].read_text())
    ]
    ends, verdicts = time.monotonic() + RUN_S, dict[str, Verdict]()
    for mutant in shuffled(mutants):
        if time.monotonic() > ends:
            break
        finding = asyncio.run(_finding(mutant, redis_url, tmp_path))
        verdicts[str(mutant)] = Verdict.SURVIVED if finding is None else Verdict.FOUND
    outcome = Outcome(verdicts, len(mutants))
    pytestconfig.get_terminal_writer().line(f"\n{outcome}")
    assert outcome.is_good


@pytest.mark.soak
@pytest.mark.timeout(RUN_S + 900)
@pytest.mark.parametrize("part", PARTS)
def test_defects_of_the_code_are_found(part: str, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "tests.faults.mutation_run", part, str(RUN_S)]  # it forks, so no thread may run
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    pytestconfig.get_terminal_writer().line(f"\n{done.stdout}{done.stderr[-2000:]}")
    assert done.returncode == 0


async def _finding(mutant: LuaMutant | None, url: str, folder: Path, *, database: int = 4) -> str | None:
    """Return the complaint about a defect; None when nothing notices it."""
    rewrite = mutant.rewrite if mutant else lambda _name, text: text
    if mutant is not None and mutant.name in AUTH_SCRIPTS:
        try:
            await run_auth_scenario(f"{url}?db={database}", folder, rewrite)
        except DEFECTS as broken:
            return f"{type(broken).__name__} {broken}"
        return None
    settings, roomy = model_settings(folder), roomy_settings(folder)

    def open_queue(fairness: Fairness | None = None) -> LogicalQueue:
        return LogicalQueue(url, roomy, fairness=fairness, rewrite=rewrite, database=database)

    for scenario in SCENARIOS:
        complaint = await _complaint(open_queue, scenario)
        if complaint is not None:
            return f"{scenario.__name__}: {complaint}"
    for seed in SEEDS:
        queue = LogicalQueue(url, settings, rewrite=rewrite, database=database)
        try:
            await run_model(queue, seed, moves=150)
        except DEFECTS as broken:
            return str(broken)
        finally:
            await queue.close()
    return None


async def _complaint(queue: Callable[[Fairness | None], LogicalQueue], scenario: Scenario) -> str | None:
    opened: list[LogicalQueue] = []

    def keep(fairness: Fairness | None = None) -> LogicalQueue:
        opened.append(queue(fairness))
        return opened[-1]

    try:
        await scenario(keep)
    except DEFECTS as broken:
        return f"{type(broken).__name__} {broken}"
    finally:
        for one in opened:
            await one.close()
    return None
