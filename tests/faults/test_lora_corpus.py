"""Every hostile LoRA file is refused by name, in bounded time and memory, and leaves nothing behind."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine import AdapterFile, Engine, EngineOptions
from serve_app.settings import ROOT
from tests.faults.lora_corpus import CORPUS, WELL_FORMED, peak_mb, processor_time, reason_of
from tests.support import POCKET

LONGEST_S, MOST_MB = 5.0, 512.0
"""Bounds of the processor time for a file, and of the memory of the process that offers them and of its children.

safetensors itself took 12 s and 1.3 GB for one of them."""

REFUSED_BEFORE_ITS_NUMBERS = {"128 MB, the last value NaN": "the base model has no such layers"}
"""By registration, which knows the base model; no layer of one is so large."""

pytestmark = pytest.mark.xdist_group("lora corpus")  # the report takes 20 s, once


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
    assert re.match(
        f"refused: (adapter file: the|the adapter) file.*{reason_of(name)}", report["rows"][name]["outcome"]
    )
    assert report["rows"][name]["seconds"] < LONGEST_S


def test_nothing_of_them_is_kept_and_memory_stays_small(report: dict[str, Any]) -> None:
    assert report["left"] == []
    assert report["peak_mb"] < MOST_MB
    assert report["child_mb"] < MOST_MB


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_registration_refuses_every_hostile_file_for_the_same_reason(tmp_path: Path) -> None:
    """Each is read in the program that registration starts."""
    path = tmp_path / "offered"
    for name, write in CORPUS.items():
        write(path)
        described = (str(POCKET), "pocket", str(path), "128", str(tmp_path / "tables"), f"{LONGEST_S:.0f}")
        command = [sys.executable, "-m", "serve_app.engine.inspection", *described]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, f"{name}: {done.stderr[-500:]}"
        reason = REFUSED_BEFORE_ITS_NUMBERS.get(name) or reason_of(name)
        assert re.search(reason, json.loads(done.stdout)["refused"]), f"{name}: {done.stdout}"
        path.unlink()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_base_prompt_draws_the_same_bytes_after_every_hostile_file(tmp_path: Path) -> None:
    """Each is offered to one engine, past the weight store."""
    path, seconds, megabytes = tmp_path / "offered", dict[str, float](), dict[str, float]()
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2)) as engine:

        def picture(**options: Any) -> bytes:
            (image,) = engine.generate("a red circle", seeds=(5,), steps=2, width=256, height=256, **options)
            return image.tobytes()

        base = picture()
        for name, write in (CORPUS | WELL_FORMED).items():
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            held, began = peak_mb(), processor_time()
            write(path)
            with pytest.raises(RuntimeError):
                picture(adapter=AdapterFile(name, path), weight=1.0)
            path.unlink()
            seconds[name], megabytes[name] = processor_time() - began, peak_mb() - held
            assert picture() == base, f"{name} changed the base's picture"
    longest, most = (max(spent, key=spent.__getitem__) for spent in (seconds, megabytes))
    print(f"\n{len(seconds)} files, {seconds[longest]:.2f} s ({longest}), {megabytes[most]:.0f} MB ({most})")  # noqa: T201 - with `-s`
    assert seconds[longest] < LONGEST_S
    assert megabytes[most] < MOST_MB
