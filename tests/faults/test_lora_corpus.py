"""Every hostile LoRA file is refused by name, in bounded time and memory, and leaves nothing behind."""

import json
import subprocess
import sys
from typing import Any

import pytest

from serve_app.settings import ROOT
from tests.faults.lora_corpus import CORPUS

LONGEST_S, MOST_MB = 5.0, 512.0
"""Processor time per file, and memory for the whole process that reads them all. safetensors itself took 12 s and 1.3 GB for one of them."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All files offered in one process of its own, so that its peak of memory is theirs."""
    folder = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, "-m", "tests.faults.lora_corpus", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_there_are_enough_of_them() -> None:
    assert len(CORPUS) >= 60


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_file_is_refused_by_name(report: dict[str, Any], name: str) -> None:
    assert report["rows"][name]["outcome"].startswith("refused: ")
    assert report["rows"][name]["seconds"] < LONGEST_S


def test_nothing_of_them_is_kept_and_memory_stays_small(report: dict[str, Any]) -> None:
    assert report["left"] == []
    assert report["peak_mb"] < MOST_MB
