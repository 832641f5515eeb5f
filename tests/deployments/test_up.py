"""`atelier up` refuses wrong options and settings with one line, before anything starts."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.local import only_one
from deployments.runtime import runtime_home
from tests.deployments.service import ENVIRONMENT
from tests.forked import Interpreter, interpreter
from tests.store.test_usable_redis import GOOD, server
from tests.support import ROOT, free_port, mounted_disk

Ends = Callable[..., tuple[int, str]]
StartError = Callable[..., str]


@pytest.fixture(autouse=True)
def _leave_nothing_in_tmp(tmp_path: Path) -> Iterator[None]:
    yield
    for data_dir in (tmp_path / "var", tmp_path / "disk" / "var"):
        shutil.rmtree(runtime_home(data_dir))


@pytest.fixture(scope="module")
def service_interpreter() -> Iterator[Interpreter]:
    with interpreter("import deployments.local") as started:
        yield started


@pytest.fixture
def ends(service_interpreter: Interpreter, tmp_path: Path) -> Ends:
    """Runs `atelier up` with these arguments and this environment; returns its exit code, and what it has printed."""

    def ends(*arguments: str, **environment: str) -> tuple[int, str]:
        output = tmp_path / "output.txt"
        output.unlink(missing_ok=True)
        defaults = ("--data-dir", str(tmp_path / "var"), "--port", str(free_port()))
        done = service_interpreter.run(
            "from deployments.local import main; main()",
            ["atelier", "up", *defaults, *arguments],
            output=output,
            errors=output,
            environment={**os.environ, **ENVIRONMENT, **environment},
        )
        return done.returncode, done.stdout

    return ends


@pytest.fixture
def start_error(ends: Ends) -> StartError:
    """Runs it likewise; returns the one line that it prints before it ends with this exit code."""

    def start_error(*arguments: str, code: int = 2, **environment: str) -> str:
        ended, printed = ends(*arguments, **environment)
        assert ended == code, printed
        (line,) = printed.splitlines()
        return line

    return start_error


def test_an_address_that_cannot_be_listened_on(start_error: StartError) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port} is in use" in start_error("--port", str(port))
    assert "192.0.2.200:" in start_error("--host", "192.0.2.200")


def test_a_place_that_cannot_be_written(start_error: StartError, tmp_path: Path) -> None:
    ready, blocked = tmp_path / "nowhere" / "ready.json", tmp_path / "file"
    assert str(ready) in start_error("--ready-file", str(ready))
    blocked.write_text("not a directory")
    assert str(blocked) in start_error("--data-dir", str(blocked))


def test_a_full_disk(start_error: StartError, tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", megabytes=1) as disk:
        (disk / "others").write_bytes(bytes(900 << 10))
        line = start_error("--data-dir", str(disk / "var"))
        assert line == f"atelier: {disk / 'var'} cannot be written (No space left on device): free some space"


def test_a_data_directory_in_use(start_error: StartError, tmp_path: Path) -> None:
    data_dir = tmp_path / "var"
    data_dir.mkdir()
    with only_one(data_dir):
        assert "in use by another service" in start_error()


def test_a_bad_setting(start_error: StartError) -> None:
    """`tests/test_settings.py` holds the others."""
    assert "ATELIER_LEASE: " in start_error(ATELIER_LEASE="soon")


def test_a_bad_catalog(ends: Ends, tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text("base_models: [{id: pocket}]")
    code, printed = ends(ATELIER_CATALOG=str(catalog))
    assert code == 2
    assert "must have either a folder or a file" in printed
    assert "Traceback" not in printed


def test_a_model_that_is_not_there(start_error: StartError, tmp_path: Path) -> None:
    """A replica would find out after a minute and a half, and answer with a traceback."""
    catalog, config = tmp_path / "catalog.yaml", tmp_path / "config.yaml"
    catalog.write_text("base_models: [{id: pocket, folder: nowhere}]")
    missing = f"base model pocket: nothing at {tmp_path / 'nowhere'}: put the diffusers folder there"
    assert start_error(ATELIER_CATALOG=str(catalog)) == f"atelier: {catalog}: {missing}"
    config.write_text("applications: [{args: {upscaler: {weights: nowhere}}}]")
    assert "args.upscaler.weights: no *.safetensors in " in start_error("--config", str(config))


def test_a_bad_config(start_error: StartError, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: [{args: {generator: {num_gpu: 1}}}]")
    assert "num_gpu" in start_error("--config", str(config))
    assert "no/such.yaml" in start_error("--config", "no/such.yaml")


def test_a_gpu_that_is_not_there(start_error: StartError) -> None:
    config = str(ROOT / "configs" / "one_gpu.yaml")
    line = start_error("--config", config, CUDA_VISIBLE_DEVICES="")
    assert "generator 0.7, upscaler 0.3" in line
    assert "nvidia-smi" in line


def test_a_service_that_marks_without_a_certificate(ends: Ends) -> None:
    ended, printed = ends(ATELIER_MARK_IMAGES="true")
    assert (ended, "try: atelier marking init" in printed) == (1, True), printed


def test_a_redis_url_of_another_scheme(start_error: StartError) -> None:
    assert "REDIS_URL" in start_error("--redis-url", "http://127.0.0.1:6379")


def test_with_json_an_unreachable_or_lossy_redis_is_one_line_on_stderr(start_error: StartError) -> None:
    """Nothing is printed on stdout before the ready line."""
    assert "cannot be reached" in start_error("--json", "--redis-url", "redis://127.0.0.1:9", code=1)
    with server(GOOD | {"aof_enabled": "0"}) as url:
        assert "forgets accepted jobs when it ends" in start_error("--json", "--redis-url", url, code=1)


def test_two_data_directories_have_two_runtime_homes(tmp_path: Path) -> None:
    homes = {runtime_home(tmp_path / name) for name in ("one", "two")}
    assert len(homes) == 2
    assert all(len(str(home)) <= 24 for home in homes), "HAProxy's socket paths would be too long"
    for home in homes:
        home.rmdir()
