"""The house keeps its own rules: what each floor may load, and a map that names every room."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "ray", "diffusers", "transformers")


def loaded_by(module: str) -> set[str]:
    """Top-level packages in memory after importing `module` in a fresh interpreter."""
    code = f"import sys, {module}; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["serve_app.api.app", "serve_app.cli", "serve_app.service.work", "serve_app.stores.jobs"]
)
def test_doors_verbs_and_stores_load_no_heavy_library(module: str) -> None:
    assert not loaded_by(module) & set(HEAVY)


def test_the_engine_runs_alone() -> None:
    assert not loaded_by("serve_app.engine") & {"ray", "fastapi", "starlette", "redis"}


def test_an_upscaler_replica_waits_for_no_diffusion_library() -> None:
    assert not loaded_by("deployments.upscaler") & {"diffusers", "transformers", "peft"}


def test_the_client_stands_alone() -> None:
    assert not loaded_by("serve_app.client") & {*HEAVY, "redis", "fastapi", "starlette", "pydantic"}


def test_the_map_names_every_file() -> None:
    house_map = (ROOT / "serve_app" / "README.md").read_text()
    rooms = [path for floor in ("serve_app", "deployments") for path in (ROOT / floor).rglob("*.py")]
    rooms += (ROOT / "serve_app").rglob("*.lua")
    missing = [
        str(path.relative_to(ROOT)) for path in rooms if path.name != "__init__.py" and path.name not in house_map
    ]
    assert not missing


def test_the_readme_names_only_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("configs/local.yaml", "configs/one_gpu.yaml", "configs/production.yaml", "configs/catalog.yaml"):
        assert name in readme
        assert (ROOT / name).exists()
    for name in (
        "configs/kuberay/rayservice.yaml",
        "notebooks/quickstart.ipynb",
        "benchmarks/RESULTS.md",
        "models/pocket/README.md",
    ):
        assert name in readme
        assert (ROOT / name).exists()
