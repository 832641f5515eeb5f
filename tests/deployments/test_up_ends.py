"""However `atelier up` ends, it says why in one line and leaves no process behind."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from deployments.runtime import kill_all_of, processes_in, runtime_home
from serve_app.store.embedded_redis import stop_redis
from tests import processes
from tests.attack.start_sync import start_sync
from tests.attack.test_listeners import listeners_of
from tests.deployments.service import START_LIMIT_S, STOP_LIMIT_S, start_up
from tests.support import ROOT, free_port

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


class Start:
    """An `atelier up` that has just been started."""

    def __init__(self, home: Path) -> None:
        self.data_dir, self._output = home / "var", home / "output.txt"

    def begin(self, *options: str, **environment: str) -> None:
        arguments = ("--data-dir", str(self.data_dir), "--port", str(free_port()), *options)
        self.process = start_up(*arguments, output=self._output, cwd=ROOT, **environment)
        self.seen: dict[int, psutil.Process] = {}

    def until_it_runs(self, program: str) -> psutil.Process:
        self._until(lambda: any(program in processes.program(pid) for pid in self.seen))
        return next(process for pid, process in self.seen.items() if program in processes.program(pid))

    def until_it_says(self, text: str) -> None:
        self._until(lambda: text in self.output)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            found = psutil.Process(self.process.pid).children(recursive=True)
            self.seen |= {process.pid: process for process in found}
            time.sleep(0.02)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def assert_ended(self, code: int, *, within: float) -> None:
        """It has ended in order, and nothing runs of everything that was seen, nor Redis."""
        try:
            assert self.process.wait(timeout=within) == code
        except subprocess.TimeoutExpired:
            pytest.fail(self.output)
        assert "Traceback" not in self.output
        assert not [pid for pid, process in self.seen.items() if process.is_running() and processes.is_alive(pid)]
        assert not processes_in(self.data_dir / "redis")

    @property
    def complaint(self) -> str:
        """The one line that says why it has ended."""
        (line,) = [line for line in self.output.splitlines() if line.startswith("atelier: ")]
        return line

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        kill_all_of(runtime_home(self.data_dir))
        stop_redis(self.data_dir)
        shutil.rmtree(runtime_home(self.data_dir))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    start.end()


@pytest.mark.parametrize("program", ["gcs_server", "raylet"])
def test_a_signal_while_ray_starts(up: Start, program: str) -> None:
    """Ray's own handlers would print a C++ stack trace and leave Redis running."""
    up.begin()
    up.until_it_runs(program)
    up.process.send_signal(signal.SIGTERM)
    up.assert_ended(0, within=STOP_LIMIT_S)
    assert up.output.splitlines()[-2:] == ["Stopping ...", "Stopped. Accounts, keys, jobs and images are kept."]
    assert "***" not in up.output


def test_ray_that_dies(up: Start) -> None:
    """Without TLS, one call of another user of this machine ends Ray's control service."""
    up.begin(RAY_USE_TLS="0")
    control_service = up.until_it_runs("gcs_server")
    up.until_it_says("  Ray ")
    start_sync(next(one.port for one in listeners_of(control_service) if one.kind == "SOCK_STREAM"))
    up.assert_ended(1, within=STOP_LIMIT_S)
    assert re.match(r"atelier: Ray has died \((gcs_server|raylet), exit code -?\d+\) \(logs: ", up.complaint)


def test_a_start_that_takes_too_long(up: Start) -> None:
    up.begin(RAY_gcs_server_port_wait_time_s="0")
    up.assert_ended(1, within=START_LIMIT_S)
    assert up.complaint.startswith("atelier: Ray did not start: Timed out")


def test_replicas_that_take_too_long_to_start(up: Start) -> None:
    up.begin("--start-limit", "1")
    up.assert_ended(1, within=START_LIMIT_S)
    assert up.complaint.startswith("atelier: the service did not start: after 1 s: ")
    assert "generator (" in up.complaint


def test_a_base_model_that_cannot_fit(up: Start, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    config["applications"][0]["args"]["generator"]["engine"] = {"adapter_memory": 10**15}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    up.begin("--config", str(file), RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT="1")  # Serve would try it three times
    up.assert_ended(1, within=START_LIMIT_S)
    assert re.match(r"atelier: the service did not start: generator: MemoryError: as float32, pocket ", up.complaint)
    assert "1000000.00 GB (adapter_memory)" in up.complaint
    assert "GB free; what helps: " in up.complaint
