"""`serve run configs/local.yaml` on this machine, and nothing without token authentication."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.one_machine import is_serve_run
from deployments.proxy import METRICS, WRAPPER, environment, haproxy_binary
from deployments.requirements import TLS_FILES, of_network, of_proxy
from tests.forked import Interpreter, bare_environment, interpreter
from tests.support import ROOT

IMPORTS = """
from ray._private import ray_constants
from ray.serve._private.request_router import pow_2_router
from ray.serve.schema import ServeDeploySchema
from deployments import runtime, start_checks
"""
"""What `deployments.one_machine` imports, which takes 2 s; that module itself is imported by each process that reads."""
READ = """
import json, os, sys, yaml
from ray.serve.schema import ServeDeploySchema
ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[-1])))
from ray._private import ray_constants
print(json.dumps({"environment": dict(os.environ), "cluster": ray_constants.ENABLE_RAY_CLUSTER, "umask": os.umask(0)}))
"""
PROTECTED = """
import ray
ray.is_initialized = lambda: True
from deployments.requirements import require_protection
from serve_app.settings import Settings
require_protection(Settings(), spread=False)
"""
"""This asks as on a running Ray: `test_groups.py` sees on one that nothing is deployed without asking."""


class ServeRun:
    """Reads a file as `serve run` does, by default for a Ray of its own: another test may have started one."""

    def __init__(self, interpreter: Interpreter, home: Path) -> None:
        self._interpreter, self._home = interpreter, home

    def __call__(
        self, *options: str, name: str = "local.yaml", then: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Return how a process has ended that reads `name`, and runs the code `then`."""
        home = str(self._home)
        own = {"HOME": home, "ATELIER_DATA_DIR": f"{home}/var", "RAY_TMPDIR": home}
        return self._interpreter.run(
            READ + then,
            ["/usr/bin/serve", "run", *(options or ("--address", "local")), str(ROOT / "configs" / name)],
            output=self._home / "output.txt",
            errors=self._home / "errors.txt",
            environment=bare_environment() | own | variables,
        )


@pytest.fixture(scope="module")
def serve_interpreter() -> Iterator[Interpreter]:
    with interpreter(IMPORTS) as started:
        yield started


@pytest.fixture
def serve_run(serve_interpreter: Interpreter, tmp_path: Path) -> ServeRun:
    return ServeRun(serve_interpreter, tmp_path)


@pytest.mark.parametrize("name", ["local.yaml", "one_gpu.yaml"])
def test_serve_run_reads_of_the_file_that_ray_stays_on_loopback(serve_run: ServeRun, name: str) -> None:
    done = serve_run(name=name)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["cluster"] is False
    assert seen["environment"]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert seen["umask"] == 0o077
    assert "RAY_AUTH_TOKEN" not in seen["environment"], "other commands could not know it"
    if haproxy_binary() is not None:
        assert seen["environment"] | environment() == seen["environment"]


def test_rays_token_is_its_owners_alone(serve_run: ServeRun, tmp_path: Path) -> None:
    """Ray writes it readable for everyone: other users could run code as this one."""
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0" * 64)
    token.chmod(0o644)
    assert serve_run().returncode == 0
    assert token.stat().st_mode & 0o777 == 0o600


MAKE_SESSION = """
from ray._common.utils import try_to_create_directory
for name in ("ray", "ray/session_1", "ray/session_1/sockets"):
    try_to_create_directory(f"{os.environ['HOME']}/{name}")
"""


def test_rays_session_of_serve_run_is_private_and_the_users_sessions_stay_side_by_side(
    serve_run: ServeRun, tmp_path: Path
) -> None:
    """Ray opens its sockets' folder to everybody, who could replace a socket by their own."""
    done = serve_run(then=MAKE_SESSION)
    assert done.returncode == 0, done.stderr
    folders = ("ray", "ray/session_1", "ray/session_1/sockets")
    assert [(tmp_path / folder).stat().st_mode & 0o7777 for folder in folders] == [0o1777, 0o700, 0o700]


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        (["--address", "10.0.0.5:6379"], {}, "10.0.0.5:6379"),
        (["-a=10.0.0.5:6379"], {}, "10.0.0.5:6379"),
        (["--address", "ray://10.0.0.5:10001"], {}, "ray://10.0.0.5:10001"),
        (["--name", "atelier"], {"RAY_ADDRESS": "10.0.0.5:6379"}, "10.0.0.5:6379"),
        (["--name", "atelier"], {"ran before": "10.0.0.5:6379"}, "10.0.0.5:6379"),
        (["--address", "local"], {"ran before": "10.0.0.5:6379"}, None),
        (["--address", "local"], {"RAY_ADDRESS": "10.0.0.5:6379"}, None),
        (["--name", "atelier"], {}, None),
    ],
)
def test_serve_run_joins_no_ray_that_was_started_without_the_protection(
    serve_run: ServeRun, tmp_path: Path, options: list[str], variables: dict[str, str], expected: str | None
) -> None:
    """Ray finds a cluster that `ray start` has started on this machine by a file."""
    (tmp_path / "ray").mkdir()
    if "ran before" in variables:
        (tmp_path / "ray" / "ray_current_cluster").write_text(variables["ran before"])
    done = serve_run(*options, **{name: value for name, value in variables.items() if name.isidentifier()})
    if expected is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert f"serve run would join the one at {expected}. Stop that one (ray stop)" in done.stderr
        assert "Traceback" not in done.stderr


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


def test_ray_without_token_authentication_is_refused(serve_interpreter: Interpreter, tmp_path: Path) -> None:
    """Callers of the port between replicas could run code. All services of other tests are deployed with a token."""
    own = {"RAY_AUTH_MODE": "disabled", "ATELIER_DATA_DIR": str(tmp_path)}
    files = {"output": tmp_path / "output.txt", "errors": tmp_path / "errors.txt"}
    own = bare_environment() | environment() | own
    done = serve_interpreter.run(PROTECTED, ["asks"], **files, environment=own)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: Ray runs without token authentication: set RAY_AUTH_")


CLUSTER = environment()


@pytest.mark.parametrize("name", [name for name in CLUSTER if name not in ("ATELIER_HAPROXY", *METRICS)])
def test_every_variable_of_the_proxys_protection_is_asked_for(name: str) -> None:
    (finding,) = of_proxy({**CLUSTER, name: ""}, spread=True)
    assert name in finding
    assert not list(of_proxy(CLUSTER, spread=True))


def test_another_haproxy_is_not_taken_for_the_protected_one() -> None:
    (finding,) = of_proxy({**CLUSTER, "RAY_SERVE_HAPROXY_BINARY_PATH": "/usr/sbin/haproxy"}, spread=False)
    assert str(WRAPPER) in finding


def test_between_machines_ray_speaks_encrypted_or_the_operator_says_what_else_does(tmp_path: Path) -> None:
    (finding,) = of_network({}, is_encrypted=False)
    assert "set RAY_USE_TLS=1" in finding
    assert "ATELIER_NETWORK_ENCRYPTED=true" in finding
    assert not list(of_network({}, is_encrypted=True))
    file = tmp_path / "tls.pem"
    file.touch()
    whole = {"RAY_USE_TLS": "1", **dict.fromkeys(TLS_FILES, str(file))}
    assert not list(of_network(whole, is_encrypted=False))
    for name in TLS_FILES:
        (finding,) = of_network({**whole, name: str(tmp_path / "none")}, is_encrypted=False)
        assert finding == f"RAY_USE_TLS is set, but {name} name no file on this node"
