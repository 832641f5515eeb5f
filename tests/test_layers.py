"""Each layer loads only the libraries that it needs, and what ships is documented."""

import subprocess
import sys
from collections.abc import Iterable, Mapping

import pytest

from tests.support import ROOT


def loaded_by(imports: Iterable[str]) -> list[set[str]]:
    """Top-level packages in memory after each of `imports` one after the other, in one fresh interpreter."""
    tell = "print(' '.join({name.split('.')[0] for name in sys.modules}))"
    code = "; ".join(["import sys", *(f"import {modules}; {tell}" for modules in imports)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "unwanted",
    [
        {
            "deployments.local": {"torch", "ray", "diffusers", "transformers", "numpy"},
            "deployments.args, serve_app.app, serve_app.cli, serve_app.worker.worker, serve_app.jobs.queue": {
                "torch",
                "ray",
                "diffusers",
                "transformers",
            },
            "deployments.app": {"torch", "diffusers", "transformers", "peft"},
        },
        {
            "serve_app.engine, serve_app.upscale.upscaler": {"ray", "fastapi", "starlette", "redis", "peft"},
            "serve_app.worker.upscale": {"diffusers", "transformers", "peft"},
        },
    ],
    ids=["the service", "workers"],
)
def test_a_layer_loads_no_library_that_it_does_not_need(unwanted: Mapping[str, set[str]]) -> None:
    """`serve build`, Serve's controller and `atelier up` read `deployments.app`, and torch would cost them seconds."""
    found = zip(unwanted.items(), loaded_by(unwanted), strict=True)
    assert {modules: loaded & libraries for (modules, libraries), loaded in found} == {key: set() for key in unwanted}


@pytest.mark.parametrize(
    "path",
    [
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.yaml")),
        "configs/helm/atelier",
        "notebooks/capacity.ipynb",
        "notebooks/many_loras.ipynb",
        "notebooks/quickstart.ipynb",
        "notebooks/train_a_lora.ipynb",
        "benchmarks/RESULTS.md",
        "models/pocket/README.md",
    ],
)
def test_a_document_names_what_is_there(path: str) -> None:
    """The other way round than tests/test_docs.py, which checks that what the documents name exists."""
    assert (ROOT / path).exists()
    assert any(path in document.read_text() for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
