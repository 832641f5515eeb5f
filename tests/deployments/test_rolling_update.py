"""A rolling update from the last commit, or that of ROLLING_FROM, to what is checked out loses no job and answers no 5xx."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.runtime import kill_all_of, runtime_home
from serve_app.store.embedded_redis import stop_redis
from tests.deployments.service import ENVIRONMENT
from tests.support import ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(900),
]


def test_an_update_under_load_loses_no_job_and_answers_no_5xx(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, report, data_dir = tmp_path / "old", tmp_path / "seen.json", tmp_path / "var"
    old.mkdir()
    packed = subprocess.run(
        ["git", "archive", os.environ.get("ROLLING_FROM", "HEAD")], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(old)], input=packed.stdout, check=True)
    home = runtime_home(data_dir)
    program = str(Path(__file__).with_name("rolling_update.py"))
    own = {"PYTHONPATH": str(ROOT), "ATELIER_DATA_DIR": str(data_dir)}
    own["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "5"  # as on a cluster
    try:
        done = subprocess.run(
            [sys.executable, program, str(home), str(report), str(old), str(ROOT)],
            cwd=tmp_path,  # a driver's working directory comes before PYTHONPATH in its workers
            env={**os.environ, **ENVIRONMENT, **own},
            capture_output=True,
            text=True,
            timeout=800,
        )
    finally:
        kill_all_of(home)
        stop_redis(data_dir)
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(report.read_text())
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(seen)}\n")
    assert seen["old_replicas"] == 6, "two ingresses, two generators, an upscaler and a housekeeper served first"
    assert seen["ended_at_old"]["completed"] > 0
    assert set(seen["ended"]) == {"completed"}
    assert set(seen["statuses"]) == {"POST 202", "GET 200"}
