"""However `atelier up` ends while Ray starts, it says why in one line and leaves no process behind.

`tests/deployments/test_service.py` sees it end while it serves; `test_groups.py` sees why replicas did not start.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.runtime import runtime_home
from tests import processes
from tests.deployments.service import START_LIMIT_S, STOP_LIMIT_S, Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.end()
    shutil.rmtree(runtime_home(service.data_dir))


@pytest.mark.parametrize("program", ["raylet", pytest.param("gcs_server", marks=pytest.mark.soak)])
def test_a_signal_while_ray_starts(up: Service, program: str) -> None:
    """Ray's own handlers would print a C++ stack trace and leave Redis running."""
    up.begin()
    seen: dict[int, str] = {}

    def has_started() -> bool:
        seen.update(processes.descendants(up.pid))
        return any(processes.program(pid) == program for pid in seen)

    up.until(has_started, limit=START_LIMIT_S, why=up.output.read_text)
    code, seconds = up.stop()
    said = up.output.read_text()
    assert (code, seconds < STOP_LIMIT_S) == (0, True), said
    assert said.splitlines()[-2:] == ["Stopping ...", "Stopped. Accounts, keys, jobs and images are kept."]
    assert "***" not in said
    assert "Traceback" not in said
    assert not [line for pid, line in seen.items() if processes.is_alive(pid)]
    assert not up.processes


def test_a_start_that_takes_too_long(up: Service) -> None:
    up.begin(RAY_gcs_server_port_wait_time_s="0")
    code, _ = up.wait_for_its_end(limit=START_LIMIT_S)
    assert (code, up.complaint.startswith("atelier: Ray did not start: Timed out")) == (1, True)
    assert not up.processes
