"""The notebooks run from their first cell to their last against a real service, and show their images."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.deployments.service import Service
from tests.support import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


def run(name: str, folder: Path, **parameters: int) -> list[Any]:
    """The outputs of a notebook, its parameters replaced."""
    notebook: Any = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = "\n".join(f"{parameter} = {value}" for parameter, value in parameters.items())
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_the_quickstart_shows_its_images(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_READY_FILE", str(service.home / "ready.json"))
    shown = run("quickstart.ipynb", tmp_path)
    texts = [output["data"]["text/plain"] for output in shown if "data" in output]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert "(1024, 1024)" in texts
    assert any("100 %" in text for text in texts)


def test_a_lora_is_trained_offered_and_compared(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short form: four pictures and three steps, which train nothing that one would want to see."""
    monkeypatch.setenv("ATELIER_READY_FILE", str(service.home / "ready.json"))
    monkeypatch.setenv("ATELIER_DATA_DIR", str(service.data_dir))
    shown = run("train_a_lora.ipynb", tmp_path, pictures=4, steps=3, size=256)
    texts = [output["data"]["text/plain"] for output in shown if "data" in output]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert any("step 3 of 3" in text for text in texts)
    assert any("rank 8" in text for text in texts), "what the check found"
    assert (tmp_path / "golden-frame" / "adapter_config.json").is_file()
