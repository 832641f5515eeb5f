"""The commands that join a Ray cluster end, also where none answers them."""

import os
import socket
import subprocess
import sys

import pytest

from tests.support import ROOT

DOCTOR = """
from deployments import cluster_commands
cluster_commands.CONNECT_LIMIT_S = 0.5
cluster_commands.check_cluster()
"""


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_waited_for_a_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-c", DOCTOR],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": f"127.0.0.1:{silent.getsockname()[1]}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "no answer within 0.5 s\n" in done.stderr
