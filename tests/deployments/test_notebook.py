"""The notebooks run from their first cell to their last against a real service, and show their images."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.deployments.service import Service
from tests.support import ROOT

pytestmark = pytest.mark.timeout(400)


def run(name: str, folder: Path, *, shows_outputs: bool = False, **parameters: float) -> list[Any]:
    """Run a notebook with its parameters replaced, and return its outputs; it draws in 4 steps where it says 20.

    With `shows_outputs` it must be stored with the outputs of a whole run, else without any.
    """
    notebook: Any = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells) == shows_outputs, "stored with outputs, or without"
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=20", "steps=4")
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = "\n".join(f"{parameter} = {value}" for parameter, value in parameters.items())
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_the_quickstart_shows_its_images(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_READY_FILE", str(service.home / "ready.json"))
    shown = run("quickstart.ipynb", tmp_path)
    texts = [output["data"]["text/plain"] for output in shown if "data" in output]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 3
    assert "(1024, 1024)" in texts
    (grid,) = [page for output in shown if (page := output.get("data", {}).get("text/html"))]
    assert "seed 1<" in grid
    assert "seed 2<" in grid


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_lora_is_trained_offered_and_compared(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a short form: four pictures and three steps, which train nothing that one would want to see."""
    monkeypatch.setenv("ATELIER_READY_FILE", str(service.home / "ready.json"))
    shown = run("train_a_lora.ipynb", tmp_path, shows_outputs=True, pictures=4, steps=3, size=256)
    texts = [output["data"]["text/plain"] for output in shown if "data" in output]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert any("step 3 of 3" in text for text in texts)
    assert any("rank 8" in text for text in texts), "what the check found"
    assert not any("Warning" in text for text in texts), "of the bar, which shows itself without widgets"
    assert (tmp_path / "golden-frame" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_the_capacity_notebook_answers_how_many_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a short form: six minutes of a small service, on one to three GPUs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    few = {"requests_per_hour": 300, "loras": 20, "accounts": 5, "hours": 0.1, "gpus_to_try": 2}
    gpu = {"seconds_per_image": 6.0, "runs": 8, "slots": 32, "cold_start_s": 20}
    goal = {"start_within_s": 60, "share_in_time": 0.2}
    shown = run("capacity.ipynb", tmp_path, shows_outputs=True, **few, **gpu, **goal)
    text = "".join(output["text"] for output in shown if output.get("name") == "stdout")
    assert "the work alone: 1.0 GPUs" in text
    assert "You need" in text
    assert any("image/png" in output.get("data", {}) for output in shown)
