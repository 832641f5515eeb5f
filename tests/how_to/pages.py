"""Follows a page of docs/how-to to the letter: its diffs are applied to a copy of the tree, where programs then run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT


def follow(page: str, into: Path) -> Path:
    """Copy what git tracks, and apply every diff of `docs/how-to/{page}.md` in the page's order."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into / name)
    diffs = re.findall(
        r"^```diff\n(.*?)^```", (ROOT / "docs/how-to" / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert diffs
    for diff in diffs:
        done = subprocess.run(["git", "apply", "--recount", "-"], cwd=into, input=diff, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    return into


def run(tree: Path, program: str) -> str:
    """Run a program with the modules of a copied tree, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check(tree: Path) -> None:
    """Assert that ruff has nothing to say of the copied tree, and that every import contract holds."""
    for tool in (
        ["ruff", "check", "-q", "serve_app"],
        ["ruff", "format", "-q", "--check", "serve_app"],
        ["lint-imports"],
    ):
        command = [str(Path(sys.executable).with_name(tool[0])), *tool[1:]]
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
