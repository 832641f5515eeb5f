"""`atelier up` refuses wrong options and settings with one line, before anything starts."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.local import only_one
from deployments.runtime import runtime_home
from tests.deployments.service import start_up
from tests.support import ROOT, free_port, mounted_disk


@pytest.fixture(autouse=True)
def _leave_nothing_in_tmp(tmp_path: Path) -> Iterator[None]:
    yield
    for data_dir in (tmp_path / "var", tmp_path / "disk" / "var"):
        shutil.rmtree(runtime_home(data_dir))


def start_error(tmp_path: Path, *arguments: str, code: int = 2, **environment: str) -> str:
    """The one line that `atelier up` prints before it ends with this exit code."""
    output = tmp_path / "output.txt"
    defaults = ("--data-dir", str(tmp_path / "var"), "--port", str(free_port()))
    process = start_up(*defaults, *arguments, output=output, **environment)
    assert process.wait(timeout=60) == code, output.read_text()
    (line,) = output.read_text().splitlines()
    return line


def test_an_address_that_cannot_be_listened_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port} is in use" in start_error(tmp_path, "--port", str(port))
    assert "192.0.2.200:" in start_error(tmp_path, "--host", "192.0.2.200")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    ready, blocked = tmp_path / "nowhere" / "ready.json", tmp_path / "file"
    assert str(ready) in start_error(tmp_path, "--ready-file", str(ready))
    blocked.write_text("not a directory")
    assert str(blocked) in start_error(tmp_path, "--data-dir", str(blocked))


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", megabytes=1) as disk:
        (disk / "others").write_bytes(bytes(900 << 10))
        line = start_error(tmp_path, "--data-dir", str(disk / "var"))
        assert line == f"atelier: {disk / 'var'} cannot be written (No space left on device): free some space"


def test_a_data_directory_in_use(tmp_path: Path) -> None:
    data_dir = tmp_path / "var"
    data_dir.mkdir()
    with only_one(data_dir):
        assert "in use by another service" in start_error(tmp_path)


def test_a_bad_setting(tmp_path: Path) -> None:
    """`tests/test_settings.py` holds the others."""
    assert "ATELIER_LEASE: " in start_error(tmp_path, ATELIER_LEASE="soon")


def test_a_bad_catalog(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text("base_models: [{id: pocket}]")
    output = tmp_path / "output.txt"
    arguments = ("--data-dir", str(tmp_path / "var"), "--port", str(free_port()))
    assert start_up(*arguments, output=output, ATELIER_CATALOG=str(catalog)).wait(timeout=60) == 2
    assert "must have either a folder or a file" in output.read_text()
    assert "Traceback" not in output.read_text()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """A replica would find out after a minute and a half, and answer with a traceback."""
    catalog, config = tmp_path / "catalog.yaml", tmp_path / "config.yaml"
    catalog.write_text("base_models: [{id: pocket, folder: nowhere}]")
    missing = f"base model pocket: nothing at {tmp_path / 'nowhere'}: put the diffusers folder there"
    assert start_error(tmp_path, ATELIER_CATALOG=str(catalog)) == f"atelier: {catalog}: {missing}"
    config.write_text("applications: [{args: {upscaler: {weights: nowhere}}}]")
    assert "args.upscaler.weights: no *.safetensors in " in start_error(tmp_path, "--config", str(config))


def test_a_bad_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: [{args: {generator: {num_gpu: 1}}}]")
    assert "num_gpu" in start_error(tmp_path, "--config", str(config))
    assert "no/such.yaml" in start_error(tmp_path, "--config", "no/such.yaml")


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "one_gpu.yaml")
    line = start_error(tmp_path, "--config", config, CUDA_VISIBLE_DEVICES="")
    assert "generator 0.7, upscaler 0.3" in line
    assert "nvidia-smi" in line


def test_a_redis_url_of_another_scheme(tmp_path: Path) -> None:
    assert "REDIS_URL" in start_error(tmp_path, "--redis-url", "http://127.0.0.1:6379")


def test_with_json_an_unreachable_redis_is_one_line_on_stderr(tmp_path: Path) -> None:
    """Nothing is printed on stdout before the ready line."""
    assert "cannot be reached" in start_error(tmp_path, "--json", "--redis-url", "redis://127.0.0.1:9", code=1)


def test_two_data_directories_have_two_runtime_homes(tmp_path: Path) -> None:
    homes = {runtime_home(tmp_path / name) for name in ("one", "two")}
    assert len(homes) == 2
    assert all(len(str(home)) <= 24 for home in homes), "HAProxy's socket paths would be too long"
    for home in homes:
        home.rmdir()
