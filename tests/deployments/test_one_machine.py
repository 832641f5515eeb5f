"""`serve run configs/local.yaml` on this machine, and nothing without token authentication."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.one_machine import is_serve_run
from deployments.proxy import environment, haproxy_binary
from tests.support import ROOT

READ = """
import json, os, sys, yaml
from ray.serve.schema import ServeDeploySchema
sys.argv = json.loads(sys.argv[1])
ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[2])))
from ray._private import ray_constants
print(json.dumps({"environment": dict(os.environ), "cluster": ray_constants.ENABLE_RAY_CLUSTER, "umask": os.umask(0)}))
"""
DEPLOY = """
import logging, os, ray, sys
from deployments.app import build
from deployments.args import AppArgs
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
try:
    build(AppArgs())
except RuntimeError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
"""


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATELIER_"))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept | variables, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["local.yaml", "one_gpu.yaml"])
def test_serve_run_reads_of_the_file_that_ray_stays_on_loopback(tmp_path: Path, name: str) -> None:
    arguments = json.dumps(["/usr/bin/serve", "run", str(ROOT / "configs" / name)])
    done = python(READ, arguments, HOME=str(tmp_path), ATELIER_DATA_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["cluster"] is False
    assert seen["environment"]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert seen["umask"] == 0o077
    assert "RAY_AUTH_TOKEN" not in seen["environment"], "other commands could not know it"
    if haproxy_binary() is not None:
        assert seen["environment"] | environment() == seen["environment"]


MAKE_SESSION = """
from ray._common.utils import try_to_create_directory
for name in ("ray", "ray/session_1", "ray/session_1/sockets"):
    try_to_create_directory(f"{os.environ['HOME']}/{name}")
"""


def test_rays_session_of_serve_run_is_private_and_the_users_sessions_stay_side_by_side(tmp_path: Path) -> None:
    """Ray opens its sockets' folder to everybody, who could put a socket of theirs in the place of one of Ray's."""
    arguments = json.dumps(["/usr/bin/serve", "run", str(ROOT / "configs" / "local.yaml")])
    done = python(READ + MAKE_SESSION, arguments, HOME=str(tmp_path), ATELIER_DATA_DIR=str(tmp_path / "var"))
    assert done.returncode == 0, done.stderr
    folders = ("ray", "ray/session_1", "ray/session_1/sockets")
    assert [(tmp_path / folder).stat().st_mode & 0o7777 for folder in folders] == [0o1777, 0o700, 0o700]


def test_other_programs_that_read_the_file_are_left_alone() -> None:
    before = dict(os.environ)
    ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "configs" / "local.yaml").read_text()))
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/x/bin/serve", "run", "configs/local.yaml"], True),
        (["serve", "run"], True),
        (["serve", "deploy", "configs/local.yaml"], False),
        (["serve"], False),
        (["/x/bin/atelier", "up"], False),
        ([], False),
    ],
)
def test_only_serve_run_starts_a_ray_of_its_own(arguments: list[str], expected: bool) -> None:
    assert is_serve_run(arguments) is expected


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray of its own")
def test_without_token_authentication_nothing_is_deployed() -> None:
    """Whoever reaches the port between replicas could run code there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets may have 107 bytes
        done = python(DEPLOY, RAY_AUTH_MODE="disabled", RAY_TMPDIR=short)
    assert done.returncode == 1
    assert "Ray runs without token authentication: set RAY_AUTH_MODE=token" in done.stderr
