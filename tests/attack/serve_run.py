"""A real service under test, started by `serve run configs/local.yaml` instead of `atelier up`."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import yaml

from deployments.runtime import kill_all_of, runtime_home
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.store.embedded_redis import stop_redis
from tests import processes
from tests.composition import open_resources
from tests.deployments.service import ENVIRONMENT, START_LIMIT_S
from tests.support import ROOT, free_port, says_ready, until

SERVE = str(Path(sys.executable).with_name("serve"))


class ServeRun:
    """`serve run` on a data directory and a port of its own, and a home of its own for Ray's token file."""

    def __init__(self, home: Path) -> None:
        self.home, self.data_dir, self.port = home, home / "var", free_port()
        self.ingress: dict[str, int] = {}
        """Arguments of the ingress other than those of the file."""
        self.output = home / "output.txt"

    def begin(self) -> None:
        content = yaml.safe_load((ROOT / "configs" / "local.yaml").read_text())
        content["http_options"]["port"] = self.port
        content["applications"][0]["args"]["ingress"] |= self.ingress
        config = self.home / "local.yaml"
        config.write_text(yaml.safe_dump(content))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {
            "HOME": str(self.home),
            "ATELIER_DATA_DIR": str(self.data_dir),
            "RAY_TMPDIR": str(runtime_home(self.home)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [SERVE, "run", str(config)],
                cwd=ROOT,
                env={**environment, **ENVIRONMENT, **own},
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(
                    signal.SIGHUP, signal.SIG_DFL
                ),  # `nohup make test` would pass on that it is ignored
            )

    def until(self, condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        until(condition, limit_s, why=self.output.read_text)

    def start(self) -> None:
        self.begin()
        self.until(self.is_ready)
        self.secret = asyncio.run(self._new_key())

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        try:
            answers = says_ready(f"http://127.0.0.1:{self.port}")
        except httpx.TransportError:
            return False
        titles = processes.descendants(self.process.pid).values()
        return answers and not any(call in title for title in titles for call in processes.CONSTRUCTORS)

    async def _new_key(self) -> str:
        async with open_resources(Settings(data_dir=self.data_dir)) as resources:
            account = await resources.accounts.create("attacked", plan_a="enterprise", plan_b="premium")
            _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
            return secret

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.wait(timeout=60)

    def end(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)
        for directory in (self.data_dir, self.home):
            kill_all_of(runtime_home(directory))
        stop_redis(self.data_dir)
