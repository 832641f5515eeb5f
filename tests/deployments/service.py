"""A real service under test: `atelier up` as a process, its replicas, and an HTTP client."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from deployments.runtime import kill_all_of, processes_in, runtime_home
from serve_app.store.embedded_redis import stop_redis
from tests.processes import command_line, descendants, program
from tests.support import ROOT, free_port, until

ATELIER = str(Path(sys.executable).with_name("atelier"))
START_LIMIT_S, STOP_LIMIT_S = 300.0, 15.0
ENVIRONMENT = {
    "ATELIER_LEASE": "PT5S",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or the other tests would starve its replicas
    "HF_HUB_OFFLINE": "1",
}


def run_program(module: str, home: Path, report: Path, *, limit_s: float, **environment: str) -> dict[str, Any]:
    """Run `python -m MODULE HOME REPORT`, which serves by itself; return what it reports, as JSON.

    Ray and Serve read the environment once, so that each has a process of its own. Nothing runs below `home` afterwards.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(home), str(report)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    finally:
        kill_all_of(home)
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(f"\n{report.read_text()}\n")  # shown by -s
    return json.loads(report.read_text())


class Event(NamedTuple):
    """An event of a job's stream."""

    name: str
    id: str
    data: dict[str, Any]


class Service:
    """One service on one data directory, which lasts over repeated `start` and `stop`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data_dir = home / "var"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client()

    def start(self) -> None:
        """Start it; return when it serves and has drawn its first image."""
        self.begin()
        self.until(lambda: self._is_ready(self.home / "ready.json"), limit=START_LIMIT_S)
        self.ready: dict[str, Any] = json.loads((self.home / "ready.json").read_text())
        self.client = httpx.Client(base_url=self.ready["base_url"], timeout=30)
        self.until(lambda: "Ctrl-C stops everything" in self.output.read_text(), limit=START_LIMIT_S)

    def begin(self, **environment: str) -> None:
        """Start its process in a working directory with a module named as one that the replicas import."""
        directory = self.home / "elsewhere"
        directory.mkdir(exist_ok=True)
        (directory / "limits.py").write_text("raise RuntimeError('a module of the working directory')")
        ready_file = self.home / "ready.json"
        ready_file.unlink(missing_ok=True)
        self.output = self.home / "output.txt"
        options = {"--port": self.port, "--data-dir": self.data_dir, "--ready-file": ready_file}
        words = [str(word) for option in options.items() for word in option]
        self._process = start_up(*words, output=self.output, cwd=directory, **environment)

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit code, and the seconds until the end."""
        assert self._process is not None
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        return self.wait_for_its_end()

    def wait_for_its_end(self, limit: float = 60) -> tuple[int, float]:
        """Return the exit code, and the seconds until the end."""
        assert self._process is not None
        began = time.monotonic()
        return self._process.wait(timeout=limit), time.monotonic() - began

    @property
    def complaint(self) -> str:
        """The one line that says why it has ended; no stack trace is printed with it."""
        said = self.output.read_text()
        (line,) = [line for line in said.splitlines() if line.startswith("atelier: ")]
        assert "Traceback" not in said
        return line

    @property
    def processes(self) -> list[str]:
        """What runs with its data directory on its command line, or in its Redis' folder."""
        redis = [program(pid) for pid in processes_in(self.data_dir / "redis")]
        return redis + [
            line for each in psutil.process_iter() if str(self.data_dir) in (line := command_line(each.pid))
        ]

    def end(self) -> None:
        """Stop everything, however far the service had started."""
        if self._process is not None and self._process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self._process.kill()
        kill_all_of(runtime_home(self.data_dir))
        stop_redis(self.data_dir)

    def post(self, body: Mapping[str, object], path: str = "/v1/generate") -> str:
        """Submit through interface A, again under one idempotency key while the service restarts; return the id."""
        headers = {**self.bearer, "Idempotency-Key": os.urandom(8).hex()}
        return self._until_success(lambda: self.client.post(path, json=body, headers=headers))["request_id"]

    def record(self, request_id: str) -> dict[str, Any]:
        return self._until_success(lambda: self.client.get(f"/v1/generate/{request_id}", headers=self.bearer))

    def result(self, request_id: str) -> dict[str, Any]:
        """The record once the request has ended."""
        return self.wait(request_id, lambda record: record["status"] != "processing")

    def wait(self, request_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        self.until(lambda: condition(self.record(request_id)))
        return self.record(request_id)

    def events(self, request_id: str, last_id: str = "") -> Iterator[Event]:
        """Follow a job on one connection, from the event with this id on. Raises `httpx.HTTPError` when it breaks."""
        headers = {**self.bearer, "Last-Event-ID": last_id}
        with self.client.stream("GET", f"/v1/jobs/{request_id}/events", headers=headers) as answer:
            answer.raise_for_status()
            fields: dict[str, str] = {}
            for name, _, value in (line.partition(": ") for line in answer.iter_lines()):
                if not name and "event" in fields:
                    yield Event(fields["event"], fields["id"], json.loads(fields["data"]))
                fields = {**fields, name: value} if name else {}

    until = staticmethod(until)

    def pngs(self, record: Mapping[str, Any]) -> list[bytes]:
        assert record["status"] == "completed", record
        return [self.client.get(image["url"]).raise_for_status().content for image in record["images"]]

    @property
    def pid(self) -> int:
        """The supervisor's, from which all but Redis descend."""
        assert self._process is not None
        return self._process.pid

    def pids(self, title: str) -> list[int]:
        """This service's processes whose title contains `title`."""
        return [pid for pid, line in descendants(self.pid).items() if title in line]

    def kill(self, title: str) -> None:
        found = self.pids(title)
        assert found, f"no process called {title}"
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.ready['keys']['both']}"}

    @property
    def lora_id(self) -> str:
        headers = {"X-API-Key": self.ready["keys"]["both"]}
        return self.client.get("/v1/models", headers=headers).raise_for_status().json()["models"][0]["id"]

    def _until_success(self, ask: Callable[[], httpx.Response]) -> dict[str, Any]:
        answers: list[httpx.Response] = []

        def succeeds() -> bool:
            try:
                answers[:] = [ask()]
            except httpx.TransportError:
                return False
            assert answers[0].is_success or answers[0].status_code >= 500, answers[0].text
            return answers[0].is_success

        self.until(succeeds)
        return answers[0].json()

    def _is_ready(self, ready_file: Path) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.output.read_text()
        return ready_file.exists()


def serve_config(port: int, args: dict[str, Any], **application: Any) -> dict[str, Any]:
    """A Serve YAML of one application with these arguments."""
    fields = {"name": "atelier", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    http = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": http, "applications": [{**fields, **application}]}


def start_up(*arguments: str, output: Path, cwd: str | Path = ROOT, **environment: str) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            [ATELIER, "up", *arguments],
            cwd=cwd,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
