"""Two Ray nodes: replicas on both, one node killed while working, and a deployment that scales up from zero."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.runtime import kill_all_of, runtime_home
from serve_app.stores.embedded import stop_redis
from tests.deployments.service import ENVIRONMENT
from tests.support import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray of its own"), pytest.mark.timeout(400)]


def test_a_killed_node_costs_its_jobs_no_more_than_time(tmp_path: Path) -> None:
    data_dir = tmp_path / "var"
    home, report = runtime_home(data_dir), tmp_path / "seen.json"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.deployments.two_nodes", str(home), str(report)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "ATELIER_DATA_DIR": str(data_dir)},
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )
    finally:
        kill_all_of(home)
        stop_redis(data_dir)
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(report.read_text())
    assert seen["nodes"] == 2, "a replica on each node"
    assert seen["statuses"] == ["completed"]
    assert seen["pictures"] == 1, "the same request gives the same bytes on every node"
    assert seen["attempts"] >= 2, "some jobs had to start over"
    assert (seen["upscalers_before"], seen["enlarged"]) == (0, "completed"), "scaled from zero to one by the backlog"
