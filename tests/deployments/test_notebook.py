"""The quickstart notebook runs from its first cell to its last against a real service, and shows its images."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.deployments.service import Service
from tests.support import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


def test_the_quickstart_shows_its_images(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_READY_FILE", str(service.home / "ready.json"))
    notebook: Any = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output["data"]["text/plain"] for output in shown if "data" in output]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert "(1024, 1024)" in texts
    assert any("100 %" in text for text in texts)
