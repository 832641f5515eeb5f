"""Each layer loads only the libraries that it needs, and what ships is documented."""

import subprocess
import sys

import pytest

from tests.support import ROOT

HEAVY = ("torch", "ray", "diffusers", "transformers")


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages in memory after importing `modules` in a fresh interpreter."""
    code = f"import sys, {', '.join(modules)}; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "deployments.args deployments.local serve_app.app serve_app.cli serve_app.worker.worker "
            "serve_app.jobs.queue",
            HEAVY,
        ),
        ("deployments.app", ("torch", "diffusers", "transformers", "peft")),
        ("serve_app.engine serve_app.upscale.upscaler", ("ray", "fastapi", "starlette", "redis", "peft")),
        ("serve_app.worker.generation serve_app.worker.upscale", ("ray", "fastapi", "starlette")),
        ("serve_app.worker.upscale", ("diffusers", "transformers", "peft")),
    ],
)
def test_a_layer_loads_no_library_that_it_does_not_need(modules: str, unwanted: tuple[str, ...]) -> None:
    """`serve build`, Serve's controller and `atelier up` read `deployments.app`, and torch would cost them seconds."""
    assert loaded_by(*modules.split()).isdisjoint(unwanted)


@pytest.mark.parametrize(
    "path",
    [
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.yaml")),
        "configs/helm/atelier",
        "configs/kustomize",
        "notebooks/capacity.ipynb",
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
