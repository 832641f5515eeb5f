"""Follows a page of docs/contribute to the letter: its diffs are applied to a copy of the tree, where programs run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT


def copy_of_the_tree(into: Path) -> Path:
    """Copy what git tracks, and what Python has compiled of it: a copied file keeps the time that it is compared by."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into / name)
    for folder in {Path(name).parent / "__pycache__" for name in tracked.split("\0") if name.endswith(".py")}:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, into / folder)
    return into


def follow(page: str, tree: Path) -> set[str]:
    """Apply every diff of `docs/contribute/{page}.md` in the page's order, and return the files that it changes."""
    text = (ROOT / "docs/contribute" / f"{page}.md").read_text()
    diffs: list[str] = re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert diffs, page
    for diff in diffs:
        run(["git", "apply", "--recount", "-"], tree, given=diff)
    return set(re.findall(r"^\+\+\+ b/(.*)", "".join(diffs), re.MULTILINE))


def run(command: Sequence[str], tree: Path, *, given: str = "", exit_code: int = 0) -> str:
    """Run a program, a tool of this environment or `python -m` there, and return what it prints."""
    program = Path(sys.executable).with_name(command[0])
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
        "GIT_CEILING_DIRECTORIES": str(tree.parent),  # in a folder inside a repository git would skip the files
    }
    done = subprocess.run(
        [str(program) if program.exists() else command[0], *command[1:]],
        cwd=tree, env=environment, input=given, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == exit_code, f"{command}\n{given}{done.stdout[-6000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr
