"""`serve run` works as docs/operations.md says, names a reason in time, and leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployments.runtime import processes_in, runtime_home
from tests.attack.serve_run import ServeRun
from tests.support import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]

ATELIER = str(Path(sys.executable).with_name("atelier"))
NAMED_WITHIN_S = 60.0
STOPPED_WITHIN_S = 40.0


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServeRun]:
    running = ServeRun(tmp_path, request.param)
    yield running
    running.end()
    for directory in (running.data_dir, tmp_path):
        shutil.rmtree(runtime_home(directory))


@pytest.mark.parametrize("run", ["local.yaml"], indirect=True)
def test_two_commands_to_a_key_that_works_and_nothing_left_at_the_end(run: ServeRun) -> None:
    run.begin()
    run.until(run.is_ready)
    environment = {**os.environ, "ATELIER_DATA_DIR": str(run.data_dir)}
    command = [ATELIER, "accounts", "create", "acme", "--json"]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    headers = {"X-API-Key": json.loads(made.stdout)["key"]}
    assert httpx.get(f"http://127.0.0.1:{run.port}/v1/models", headers=headers).is_success
    assert "GET /v1/models" not in run.output.read_text(), "no access log"
    redis = run.data_dir / "redis"
    assert processes_in(redis)
    run.stop(signal.SIGHUP)  # the terminal is closed: no code of ours runs in that process any more
    run.until(lambda: not processes_in(redis), STOPPED_WITHIN_S)


@pytest.mark.parametrize("run", ["one_gpu.yaml"], indirect=True)
def test_a_gpu_that_is_not_there_is_named_in_time(run: ServeRun) -> None:
    run.begin()
    run.until(lambda: "GPUs are asked for (generator 0.7, upscaler 0.3)" in run.output.read_text(), NAMED_WITHIN_S)
