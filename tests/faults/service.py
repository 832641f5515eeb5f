"""Runs `atelier up` as a process with its own data directory and port, to be killed and started again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import yaml

from deployments.runtime import kill_all_of, runtime_home
from serve_app.settings import ROOT, Settings
from serve_app.store.redis_process import server_process
from tests import processes
from tests.deployments.service import serve_config
from tests.support import free_port, wait_until

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
PLANS = [{"interface": interface, "name": "roomy", "limit": 1_000_000, "window_s": 3600} for interface in "ab"]


class Service:
    """The real application: Ray, HAProxy, Redis, engine, storage."""

    def __init__(self, folder: Path, *, generators: int = 2, ingresses: int = 2, lease_s: int = 10) -> None:
        self.data_dir = folder / "d"
        self.data_dir.mkdir(parents=True)
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._config = folder / "serve.yaml"
        one_thread = {"drain_s": 3, "threads": 1}
        args = {
            "ingress": {"replicas": ingresses, "drain_s": 2},
            "generator": {"replicas": generators, "engine": {"max_rows": 4}, **one_thread},
            "upscaler": one_thread,
        }
        self._config.write_text(yaml.safe_dump(serve_config(self.port, args)))
        plans = folder / "plans.yaml"
        plans.write_text(yaml.safe_dump(PLANS))
        self.environment = {"ATELIER_LEASE": f"PT{lease_s}S", "ATELIER_PLANS": str(plans), "HF_HUB_OFFLINE": "1"}
        self.settings = Settings.model_validate({"data_dir": self.data_dir, "lease": f"PT{lease_s}S", "plans": plans})
        self.log = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.AsyncClient()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def runtime_home(self) -> Path:
        return runtime_home(self.data_dir)

    async def start(self) -> None:
        """Start it; return when it has drawn its first image and is ready.

        An earlier start's image is removed first.
        """
        (self.data_dir / "first-image.png").unlink(missing_ok=True)
        self._process = self._launch()
        await wait_until(self._has_drawn, timeout=START_LIMIT_S)

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from deployments.local import main; main()", "up"]
        command += ["--config", str(self._config), "--data-dir", str(self.data_dir), "--port", str(self.port)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | self.environment, stdout=log, stderr=log, start_new_session=True
            )

    async def _has_drawn(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the service ended:\n{self.log.read_text()[-2000:]}"
        return (self.data_dir / "first-image.png").exists() and await self.is_ready()

    def pids(self, part: str, *, at_work: bool = False) -> list[int]:
        """The processes of one part, Redis included; with `at_work` those alone that have started."""
        if part == "redis":
            pid = server_process(self.data_dir / "redis")
            return [pid] if pid else []
        return (processes.started_of_part if at_work else processes.of_part)(self.pid, part)

    async def is_ready(self) -> bool:
        try:
            return (await self._client.get(f"{self.base_url}/readyz", timeout=5)).is_success
        except httpx.HTTPError:
            return False

    def kill_everything(self) -> None:
        """Kill what a machine's sudden end would: all of Ray, of the replicas, of Redis."""
        for pid in (self.pid, *processes.descendants(self.pid), *self.pids("redis")):
            processes.kill(pid)
        kill_all_of(self.runtime_home)
        assert self._process is not None
        self._process.wait(10)

    async def stop(self) -> None:
        """Stop it as Ctrl-C does, and kill what is left then."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        process = self._process
        try:
            await wait_until(lambda: process.poll() is not None, timeout=STOP_LIMIT_S)
        except TimeoutError:
            self.kill_everything()
