"""Measures branch coverage of the Lua scripts, as a pytest plugin: `pytest -p tests.lua_coverage`.

It also has coverage.py measure the programs that read customers' files, which get an environment of their own.
It prints a table at the end. Every condition of an `if`, an `elseif` or a `while` reports its outcome with `redis.log`,
which changes no data. The tests run instrumented copies of the scripts; the log of each server of `volatile_redis` is
read when all tests have ended. Tests that rewrite or damage a script's text are marked `script_text` and run the
scripts as they are.
"""

import asyncio
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
REDIS_LOG_FOLDER = "TESTS_REDIS_LOGS"
"""Environment variable: the folder where the servers of `volatile_redis` log."""
FOLDER = ROOT / ".coverage" / "lua"
SCRIPTS = ROOT / "serve_app"
"""Holds a folder `scripts` in each concern."""
HELPER = (
    "local function branch(id, value) "
    "redis.log(redis.LOG_WARNING, 'branch ' .. id .. (value and ' true' or ' false')) return value end\n"
)
_CONDITION = re.compile(
    r"--[^\n]*|'[^'\n]*'|\b(?P<word>if|elseif|while)\b(?P<condition>.+?)\b(?P<end>then|do)\b", re.DOTALL
)
_OUTCOME = re.compile(r"branch (\S+ true|\S+ false)")


def instrument(name: str, text: str) -> str:
    """Wrap each condition of the script in a call that logs `name:line:column` and the outcome."""

    def wrap(found: re.Match[str]) -> str:
        if found["word"] is None or found["condition"].strip() == "true":
            return found[0]
        return f"{found['word']} branch('{_position(name, text, found.start())}', {found['condition']}) {found['end']}"

    return _CONDITION.sub(wrap, text)


def branches(name: str, text: str) -> Iterator[str]:
    """Both outcomes of each condition."""
    for found in _CONDITION.finditer(text):
        if found["word"] is not None and found["condition"].strip() != "true":
            position = _position(name, text, found.start())
            yield from (f"{position} true", f"{position} false")


def _position(name: str, text: str, index: int) -> str:
    before = text[:index].split("\n")
    return f"{name}:{len(before)}:{len(before[-1]) + 1}"


def pytest_configure(config: pytest.Config) -> None:
    start = asyncio.create_subprocess_exec

    def measured(*command: Any, env: dict[str, str] | None = None, **options: Any) -> Any:
        told = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        return start(*command, env=env and env | told, **options)

    asyncio.create_subprocess_exec = measured
    if hasattr(config, "workerinput"):
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    for path in SCRIPTS.glob("*/scripts/*.lua"):
        copy = FOLDER / "serve_app" / path.relative_to(SCRIPTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((HELPER if path.stem == "common" else "") + instrument(path.stem, path.read_text()))
    os.environ[REDIS_LOG_FOLDER] = str(FOLDER)


def pytest_sessionstart() -> None:
    _load_scripts_from(FOLDER / "serve_app")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that rewrites or damages a script's text runs the scripts as they are."""
    if item.get_closest_marker("script_text") is None:
        return (yield)
    _load_scripts_from(SCRIPTS)
    try:
        return (yield)
    finally:
        _load_scripts_from(FOLDER / "serve_app")


def _load_scripts_from(folder: Path) -> None:
    from serve_app.store import script  # here, once coverage.py measures imports

    script._ROOT = folder  # pyright: ignore[reportPrivateUsage]
    script.load_script.cache_clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen = {outcome for log in FOLDER.glob("*.log") for outcome in _outcomes(log)}
    terminalreporter.section("branch coverage of the Lua scripts")
    total = missed = 0
    for path in sorted(SCRIPTS.glob("*/scripts/*.lua")):
        wanted = list(branches(path.stem, path.read_text()))
        missing: defaultdict[str, list[str]] = defaultdict(list)
        for outcome in wanted:
            if outcome not in seen:
                position, value = outcome.removeprefix(f"{path.stem}:").split()
                missing[position].append(value)
        names = ", ".join(f"{position} never {' or '.join(values)}" for position, values in missing.items())
        lacking = sum(map(len, missing.values()))
        total, missed = total + len(wanted), missed + lacking
        terminalreporter.write_line(f"{path.name:<22} {len(wanted):>4} {_percent(len(wanted), lacking):>5}  {names}")
    terminalreporter.write_line(f"{'TOTAL':<22} {total:>4} {_percent(total, missed):>5}")


def _outcomes(log: Path) -> set[str]:
    with log.open(errors="replace") as lines:
        return {found[1] for line in lines for found in _OUTCOME.finditer(line)}


def _percent(total: int, missed: int) -> str:
    return f"{100 * (total - missed) / total:.0f}%" if total else "-"
