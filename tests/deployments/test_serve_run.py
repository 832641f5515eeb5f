"""`serve run` works as docs/operations.md says, names a reason in time, and leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployments.runtime import processes_in, runtime_home
from tests.attack.raw import breach, parse
from tests.attack.serve_run import ServeRun
from tests.attack.test_slow_clients import held, receive_all
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
    run.ingress = {"max_ongoing_requests": 2, "max_queued_requests": 2}
    run.begin()
    run.until(run.is_ready)
    environment = {**os.environ, "ATELIER_DATA_DIR": str(run.data_dir)}
    command = [ATELIER, "accounts", "create", "acme", "--json"]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    key = json.loads(made.stdout)["key"]
    models = httpx.get(f"http://127.0.0.1:{run.port}/v1/models", headers={"X-API-Key": key})
    assert models.is_success
    assert_requests_beyond_the_bound_are_refused(run.port, key, models.json()["models"][0]["id"])
    assert "GET /v1/models" not in run.output.read_text(), "no access log"
    redis = run.data_dir / "redis"
    assert processes_in(redis)
    run.stop(signal.SIGHUP)  # the terminal is closed: no code of ours runs in that process any more
    run.until(lambda: not processes_in(redis), STOPPED_WITHIN_S)


@pytest.mark.parametrize("run", ["one_gpu.yaml"], indirect=True)
def test_a_gpu_that_is_not_there_is_named_in_time(run: ServeRun) -> None:
    run.begin()
    run.until(lambda: "GPUs are asked for (generator 0.7, upscaler 0.3)" in run.output.read_text(), NAMED_WITHIN_S)


def assert_requests_beyond_the_bound_are_refused(port: int, key: str, lora_id: str) -> None:
    """The ingress takes two requests at once and lets two wait: of twelve, the rest are refused."""
    body = {"positive_prompt": "a boat", "model_id": lora_id}
    accepted = httpx.post(f"http://127.0.0.1:{port}/v1/generate", json=body, headers={"X-API-Key": key})
    lines = [
        f"GET /v1/generations/{accepted.json()['run_id']} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"X-API-Key: {key}",
        "Prefer: wait=5",
        "Connection: close",
    ]
    with held(port, 12, "\r\n".join(lines).encode() + b"\r\n\r\n") as connections:
        answers = [answer for connection in connections for answer in parse(receive_all(connection))]
    statuses = Counter(answer.status for answer in answers)
    assert statuses == {200: statuses[200], 503: statuses[503]}
    assert 4 <= statuses[200] <= 8, "a place may be free again by the time of a late one"
    refused = [answer for answer in answers if answer.status == 503]
    assert {json.loads(answer.body)["error"]["code"] for answer in refused} == {"overloaded"}
    assert [fault for answer in refused if (fault := breach(answer))] == []
