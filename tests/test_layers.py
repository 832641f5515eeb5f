"""Which libraries each layer loads when it is imported; what ships is documented."""

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
def test_api_cli_worker_jobs_and_args_load_no_heavy_library() -> None:
    modules = ("app", "cli", "worker.worker", "jobs.queue")
    loaded = loaded_by("deployments.args", *(f"serve_app.{module}" for module in modules))
    assert not loaded & set(HEAVY)


@pytest.mark.slow
def test_describing_the_application_loads_ray_and_no_model_library() -> None:
    """`serve build`, `serve deploy`, Serve's controller and `atelier up` read it.

    torch would cost each of them seconds.
    """
    assert loaded_by("deployments.app").isdisjoint({"torch", "diffusers", "transformers", "peft"})


@pytest.mark.slow
def test_the_engine_and_the_upscaler_run_alone() -> None:
    """PEFT takes two seconds to import, and is needed by tests and trainers alone."""
    loaded = loaded_by("serve_app.engine", "serve_app.upscale.upscaler")
    assert not loaded & {"ray", "fastapi", "starlette", "redis", "peft"}


@pytest.mark.slow
def test_the_executors_load_neither_ray_nor_http() -> None:
    loaded = loaded_by("serve_app.worker.generation", "serve_app.worker.upscale")
    assert not loaded & {"ray", "fastapi", "starlette"}


@pytest.mark.slow
def test_an_upscaler_replica_loads_no_diffusion_library() -> None:
    assert not loaded_by("serve_app.worker.upscale") & {"diffusers", "transformers", "peft"}


@pytest.mark.slow
def test_the_client_stands_alone() -> None:
    assert not loaded_by("serve_app.client") & {*HEAVY, "redis", "fastapi", "starlette", "pydantic"}


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
