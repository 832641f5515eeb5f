"""`make gpu` needs the engine's libraries alone, tells what failed or was cut, and goes on where it stopped."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import left, main
from benchmarks.gpu_pieces import PIECES
from benchmarks.gpu_tables import BEGIN, END, RECORDS, RESULTS, keep, read, tables, with_tables
from tests.support import ROOT

ABSENT = ("ray", "redis", "fastapi", "starlette", "pydantic", "pydantic_settings", "scipy", "torchsde", "matplotlib")
"""The machine with a card has none of these."""
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))  # importing one raises ModuleNotFoundError\n"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the benchmark, whose pieces are processes of their own that lack these libraries."""
    started = f"open({str(tmp_path / 'started')!r}, 'a').write('one more ')\n"
    (tmp_path / "sitecustomize.py").write_text(WITHOUT + started)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "record"), *words])
        main()

    return run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the first call fails only where there is no GPU")
def test_a_rehearsal_tells_of_each_piece_and_is_taken_up_again(tmp_path: Path, gpu: Callable[..., None]) -> None:
    gpu("--only", "attention")
    failed = read(tmp_path / "record" / "no-card.json")["attention"]
    assert failed["failure"].splitlines()[-1] == "RuntimeError: torch finds no CUDA card"
    assert (tmp_path / "started").read_text(), "a piece has an interpreter of its own: a forked one would inherit CUDA"

    record = tmp_path / "record" / "rehearsal.json"
    gpu("--tiny", "--only", "attention")
    assert read(record) == read(tmp_path / "rehearsal.json"), "what was found is brought back"
    assert read(record)["attention"]["found"]["shapes"]["klein"]["MATH"]["same bits at rows"] == [1, 2, 4, 8]
    assert "attention" not in [piece.name for piece in left(record)]

    gpu("--tiny", "--minutes", "0.05")  # the first that is missing, for three seconds
    assert read(record)["bytes-sdxl"]["failure"] == "cut at its limit"
    assert left(record)[0].name == "bytes-sd15", "those never tried come next"
    assert left(record)[-1].name == "bytes-sdxl", "and last what failed"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_piece_is_rehearsed(tmp_path: Path, gpu: Callable[..., None]) -> None:
    gpu("--tiny", "--minutes", "60")
    found = read(tmp_path / "record" / "rehearsal.json")
    assert set(found) == {piece.name for piece in PIECES}
    assert not {name: one["failure"] for name, one in found.items() if "failure" in one}
    made = [found[f"bytes-{model}"]["found"]["same bytes"] for model in ("sdxl", "sd15", "z-image", "klein")]
    assert made == ["12 of 12"] * 4


def test_the_tables_of_the_results_are_made_of_the_records(tmp_path: Path) -> None:
    records = {file.stem: read(file) for file in sorted(RECORDS.glob("*.json"))}
    assert RESULTS.read_text() == with_tables(RESULTS.read_text(), records), "python -m benchmarks.gpu_tables"
    for name, one in (
        ("bytes-sdxl", {"found": {"same bytes": "64 of 64"}}),
        ("fp8-sdxl", {"found": {}, "skipped": "no such option"}),
        ("speed-sdxl", {"found": {"16 LoRAs": {"images/s": 1.4}}, "failure": "cut at its limit"}),
    ):
        keep(tmp_path / "card.json", name, one)
    made = tables({"card": read(tmp_path / "card.json")})
    assert "| all | 64 of 64 |" in made
    assert "| 1.75 | not measured: no such option |" in made
    assert "| 1.65 | 1.4 |" in made, "what a piece found before it was cut"
    assert "| 0.92 | failed |" in made
    assert made.count("| not measured |") > 10
    assert with_tables(f"before\n{BEGIN}old\n{END}after\n", {"card": {}}).endswith(f"{END}after\n")
