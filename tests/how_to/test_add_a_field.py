"""The page on adding a field is followed to the letter on a copy of the repository, and an image asked for with it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PAGE = ROOT / "docs" / "how-to" / "add-a-field.md"
MOST_FILES = 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_field_is_added_as_the_page_says(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    text = PAGE.read_text()
    blocks: list[str] = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    changed = [block.split(maxsplit=2)[1].removeprefix("a/") for block in blocks]
    assert len(set(changed)) <= MOST_FILES
    for name, block in zip(changed, blocks, strict=True):
        assert f"`{name}`" in text, "a file is named in words too"
        _run("git", "apply", "--recount", "--unidiff-zero", "-", given=block, cwd=tmp_path)
    _run(sys.executable, "-m", "tests.how_to.mirrored", str(tmp_path / "service"), cwd=tmp_path)


def _run(*command: str, cwd: Path, given: str = "") -> None:
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(cwd.parent), "PYTHONPATH": str(cwd)}
    done = subprocess.run(command, cwd=cwd, input=given, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{given}{done.stdout}{done.stderr}"
