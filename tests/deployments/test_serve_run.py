"""`serve run` works as docs/operate says, and leaves nothing behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deployments.runtime import processes_in, runtime_home
from tests.attack.raw import breach, exchange, parse
from tests.attack.requests import trailed
from tests.attack.serve_run import ServeRun
from tests.attack.test_slow_clients import held, open_ones, receive_all
from tests.support import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]

ATELIER = str(Path(sys.executable).with_name("atelier"))
STOPPED_WITHIN_S = 40.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ServeRun]:
    running = ServeRun(tmp_path)
    yield running
    running.end()
    for directory in (running.data_dir, tmp_path):
        shutil.rmtree(runtime_home(directory))


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
    assert_half_sent_bodies_take_no_place(run.port, key)
    assert_trailers_are_no_headers(run.port, key)
    assert "GET /v1/models" not in run.output.read_text(), "no access log"
    redis = run.data_dir / "redis"
    assert processes_in(redis)
    run.stop(signal.SIGHUP)  # the terminal is closed: no code of ours runs in that process any more
    run.until(lambda: not processes_in(redis), STOPPED_WITHIN_S)


def assert_half_sent_bodies_take_no_place(port: int, key: str) -> None:
    """Ten times as many are open as the ingress takes, and it has asked each of them for its body."""
    rows = f"Host: a\r\nAuthorization: Bearer {key}\r\nContent-Length: 100\r\nExpect: 100-continue"
    with ExitStack() as stack:
        halves: list[socket.socket] = []
        for _ in range(20):
            halves += stack.enter_context(held(port, 1, f"POST /v1/generate HTTP/1.1\r\n{rows}\r\n\r\n".encode()))
            assert halves[-1].recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
            halves[-1].sendall(b"{")
        answers = [httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"X-API-Key": key}) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert open_ones(halves) == len(halves)


def assert_trailers_are_no_headers(port: int, key: str) -> None:
    statuses = [
        [answer.status for answer in exchange(port, head + body)]
        for head, body in (
            trailed("a", [], f"X-API-Key: {key}"),
            trailed("a", [], f"Authorization: Bearer {key}"),
            trailed("a", [f"Authorization: Bearer {key}"], "Content-Encoding: gzip"),
        )
    ]
    assert statuses == [[401], [401], [403]]


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
