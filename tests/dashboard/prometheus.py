"""Starts a Prometheus that scrapes a service, and asks it the queries of dashboards."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from tests.support import ROOT

MONITORING = ROOT / "configs" / "monitoring"
SCRAPE_S = 5
START_S = 60
RATE_INTERVAL_S = 4 * SCRAPE_S
"""Grafana's `$__rate_interval`, where a pixel stands for less than a scrape."""


class Series(NamedTuple):
    """One line of a panel: its name in the legend, times in seconds and values."""

    name: str
    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    http: httpx.Client

    def series(self, target: dict[str, Any], begin: float, end: float) -> list[Series]:
        """Ask a panel's query, as Grafana does, of a span of time."""
        query = target["expr"].replace("$__rate_interval", f"{RATE_INTERVAL_S}s")
        asked = {"query": query, "start": begin, "end": end, "step": SCRAPE_S}
        result = (self._get("/api/v1/query_range", **asked))["result"]
        return [_series(target["legendFormat"], row) for row in result]

    def rules(self) -> dict[str, str]:
        """Return the state of each alert; Prometheus' own error instead of a rule that it cannot evaluate."""
        groups = (self._get("/api/v1/rules"))["groups"]
        return {rule["name"]: rule.get("lastError") or rule["state"] for group in groups for rule in group["rules"]}

    def _get(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer = self.http.get(path, params=parameters)
        answer.raise_for_status()
        return answer.json()["data"]


def _series(legend: str, row: dict[str, Any]) -> Series:
    name = re.sub(r"{{\s*(\w+)\s*}}", lambda found: row["metric"].get(found[1], ""), legend).strip()
    points = [(float(time), float(value)) for time, value in row["values"] if value != "NaN"]
    return Series(name, [time for time, _ in points], [value for _, value in points])


@contextmanager
def scraping(base_url: str, token_file: Path, folder: Path) -> Generator[Prometheus]:
    """Scrape a service of this machine, with the repository's configuration and alerts."""
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("no prometheus on PATH (Debian: apt-get install prometheus)")
    address = f"127.0.0.1:{_free_port()}"
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(_configuration(base_url, token_file)))
    words = ("--config.file", folder / "prometheus.yaml", "--storage.tsdb.path", folder / "data")
    with subprocess.Popen([program, *words, "--web.listen-address", address, "--log.level", "error"]) as server:
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30) as http:
                _wait_until_ready(http)
                yield Prometheus(http)
        finally:
            server.terminate()


def _wait_until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if http.get("/-/ready").is_success:
                return
        time.sleep(0.2)
    raise SystemExit(f"Prometheus did not start within {START_S} seconds")


def _configuration(base_url: str, token_file: Path) -> dict[str, Any]:
    configuration = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    configuration["rule_files"] = [str(MONITORING / name) for name in configuration["rule_files"]]
    configuration["global"] = {"evaluation_interval": f"{SCRAPE_S}s"}
    [scrape] = configuration["scrape_configs"]
    scrape["authorization"]["credentials_file"] = str(token_file.resolve())
    scrape |= {"scrape_interval": f"{SCRAPE_S}s", "static_configs": [{"targets": [base_url.partition("://")[2]]}]}
    return configuration


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def dashboard_panels() -> list[dict[str, Any]]:
    return json.loads((MONITORING / "dashboard.json").read_text())["panels"]
