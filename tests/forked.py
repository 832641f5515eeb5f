"""Runs programs in forks of an interpreter that has imported what they need, which for the service takes over a second."""

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from tests.support import ROOT

_SERVER = """
import gc, json, os, sys
gc.disable()
exec(sys.argv[1])
gc.freeze()
gc.enable()
for line in sys.stdin:
    program, arguments, folder, environment, *files = json.loads(line)
    if not (child := os.fork()):
        opened = [os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND) for file in (os.devnull, *files)]
        for number, file in enumerate(opened):
            os.dup2(file, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        exec(program)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def bare_environment() -> dict[str, str]:
    """This process's environment without what configures Ray or the service."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATELIER_"))}


class Interpreter:
    """An interpreter that waits for programs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._asked, self._answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

    def run(
        self,
        program: str,
        arguments: list[str],
        *,
        output: Path,
        errors: Path,
        environment: Mapping[str, str],
        folder: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code with these `sys.argv` in a fork, and return how it has ended."""
        asked = [program, arguments, str(folder), dict(environment), str(output), str(errors)]
        self._asked.write(json.dumps(asked) + "\n")
        self._asked.flush()
        code = int(self._answers.readline())
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


@contextmanager
def interpreter(imports: str) -> Generator[Interpreter]:
    """Start an interpreter with these imports, without what configures Ray or the service, until the block ends."""
    command, pipe = [sys.executable, "-c", _SERVER, imports], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=bare_environment(), stdin=pipe, stdout=pipe, text=True) as process:
        yield Interpreter(process)
