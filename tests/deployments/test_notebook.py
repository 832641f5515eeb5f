"""The notebooks run from their first cell to their last against a real service, and keep what a whole run showed."""

import re
import shutil
from base64 import b64decode
from collections.abc import Iterable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.deployments.service import Service
from tests.support import ROOT

pytestmark = pytest.mark.timeout(400)
PICTURES = {"quickstart": 4, "many_loras": 3, "train_a_lora": 2, "capacity": 1}
"""How many pictures each notebook shows."""
LARGEST = 900_000
UNWANTED = re.compile(r"(?:^|[\s'\"(])/\w+/\S*|-\d[\d.]* s\b|Warning|WARNING|Traceback|\x1b", flags=re.MULTILINE)
"""Paths of a machine, negative seconds, complaints and colors of a terminal."""


class Shown(NamedTuple):
    """What a notebook's cells show: all text, and its pictures' pixels."""

    text: str
    pictures: list[Image.Image]


def read(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def shown_by(cells: Iterable[Any]) -> Shown:
    """Read the outputs of cells, which neither complain nor show an empty picture."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr" or output.output_type == "error"]
    shown = [output.get("data", {}) for output in outputs]
    text = "\n".join(
        output.get("text", data.get("text/plain", "")) for output, data in zip(outputs, shown, strict=True)
    )
    pictures = [
        Image.open(BytesIO(b64decode(data["image/png"]))).convert("RGB") for data in shown if "image/png" in data
    ]
    assert not UNWANTED.findall(text)
    assert all(len(set(picture.resize((32, 32)).tobytes())) > 16 for picture in pictures), "not of one color"
    return Shown(text, pictures)


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_keeps_what_a_whole_run_showed(name: str) -> None:
    cells = read(name).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], "from the first cell to the last"
    told = [before.cell_type == "markdown" for before, cell in pairwise(cells) if cell.cell_type == "code"]
    assert all(told), "words are before every cell"
    assert len(shown_by(cells).pictures) == PICTURES[name]
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < LARGEST


def run(name: str, checkout: Path, *, last: str = "", **parameters: float) -> Shown:
    """Run a notebook with other parameters, and `last` after its cells."""
    notebook = read(name)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += "".join(f"\n{parameter} = {value}" for parameter, value in parameters.items())
    notebook.cells.append(nbformat.v4.new_code_cell(last))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(checkout / "notebooks")}}).execute()
    shown = shown_by(notebook.cells)
    assert len(shown.pictures) == PICTURES[name]
    return shown


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the notebooks find beside their own, and nothing else."""
    (tmp_path / "notebooks").mkdir()
    for name in ("models", "benchmarks", "tests", "notebooks/sheet.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def running(checkout: Path, service: Service) -> Path:
    """The same, as `make run` leaves it."""
    (checkout / "var").mkdir()
    shutil.copy(service.home / "ready.json", checkout / "var" / "local.json")
    return checkout


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_the_quickstart_draws_enlarges_and_tells_the_seconds(running: Path) -> None:
    text, pictures = run("quickstart", running, steps=2, size=256)
    assert pictures[0].size == (256, 256)
    assert "256 × 256 → 512 × 512" in text
    assert re.findall(r"^(\w+) +\d+\.\d\d s", text, flags=re.MULTILINE) == ["queue", "load", "denoise", "store"] * 2
    assert text.endswith("True"), "the same seed gives the same file"


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_the_engine_draws_many_loras_at_once_and_as_the_service_does(running: Path) -> None:
    text, _ = run("many_loras", running, steps=2, size=256, timed_size=256, repeats=1)
    assert "the widest pass had 16 rows with 8 LoRAs" in text
    assert re.search(r"^in one batch +\d+\.\d s \(.*^one after the other +\d+\.\d s \(", text, re.MULTILINE | re.DOTALL)
    assert "8 of 8 pictures are equal to the last bit" in text


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_lora_is_trained_offered_and_compared(running: Path) -> None:
    """It runs in a short form: four pictures and three steps, which train nothing that one would want to see."""
    text, _ = run("train_a_lora", running, pictures=4, steps=3, size=256, drawing_steps=2)
    assert "step 3 of 3" in text
    assert "rank 8" in text, "what the check found"
    assert (running / "notebooks" / "golden-frame" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_the_capacity_notebook_answers_how_many_gpus(checkout: Path) -> None:
    """It runs in a short form: six minutes of a small service, on one or two GPUs."""
    few = {"requests_per_hour": 300, "loras": 20, "accounts": 5, "hours": 0.1, "gpus_to_try": 2}
    gpu = {"seconds_per_image": 6.0, "runs": 8, "slots": 32, "cold_start_s": 20, "price_per_hour": 1.5}
    goal = {"start_within_s": 60, "share_in_time": 0.2}
    lowest = "print('lowest', min(axis.get_ylim()[0] for axis in figure.axes))"
    text, _ = run("capacity", checkout, last=lowest, **few, **gpu, **goal)
    assert "the work alone: 1.0 GPUs" in text
    as_in_table = r"^ *(\d) GPUs \| +(\S+) \|.*^You need \1 GPUs: \2 of .* and a thousand images cost \d\.\d\d\."
    assert re.search(as_in_table, text, re.MULTILINE | re.DOTALL)
    assert "lowest 0.0" in text, "no axis shows negative seconds"
