"""A real service under test, started by `serve run configs/local.yaml` instead of `atelier up`."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import yaml

from deployments.runtime import kill_all_of, runtime_home
from serve_app.domain.requests import Variant
from serve_app.service.resources import open_resources
from serve_app.settings import Settings
from serve_app.stores.embedded import stop_redis
from tests.deployments.service import ENVIRONMENT, START_LIMIT_S
from tests.support import ROOT, free_port

SERVE = str(Path(sys.executable).with_name("serve"))


class ServeRun:
    """`serve run` on a data directory and a port of its own, and a home of its own for Ray's token file."""

    def __init__(self, home: Path) -> None:
        self.home, self.data_dir, self.port = home, home / "var", free_port()
        self.output = home / "output.txt"

    def start(self) -> None:
        content = yaml.safe_load((ROOT / "configs" / "local.yaml").read_text())
        content["http_options"]["port"] = self.port
        config = self.home / "local.yaml"
        config.write_text(yaml.safe_dump(content))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {
            "HOME": str(self.home),
            "ATELIER_DATA_DIR": str(self.data_dir),
            "RAY_TMPDIR": str(runtime_home(self.home)),
        }
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [SERVE, "run", str(config)],
                cwd=ROOT,
                env={**environment, **ENVIRONMENT, **own},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)
        self.secret = asyncio.run(self._new_key())

    def _is_ready(self) -> bool:
        try:
            answers = httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False
        return answers and not any(call in title for title in self._titles() for call in (".__init__", ".initialize"))

    def _titles(self) -> list[str]:
        """What its processes are doing, by Ray's titles: a replica that runs its constructor is starting."""
        titles: list[str] = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                titles += process.cmdline()
        return titles

    async def _new_key(self) -> str:
        async with open_resources(Settings(data_dir=self.data_dir)) as resources:
            account = await resources.accounts.create("attacked", plan_a="enterprise", plan_b="premium")
            _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
            return secret

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=60)
        for directory in (self.data_dir, self.home):
            kill_all_of(runtime_home(directory))
        stop_redis(self.data_dir)
