"""Draws docs/images/dashboard.png: Grafana's dashboard of the repository, by its own queries.

It runs the real application and the pocket model on this machine under load, scraped by a real Prometheus.
It is no screenshot of Grafana, whose licence keeps it from being a tool of this repository.
"""

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from serve_app.engine import EngineOptions
from serve_app.settings import Settings
from tests.browser.broken_lora import break_lora
from tests.browser.site import Site, open_site
from tests.dashboard.drawing import Drawn, draw
from tests.dashboard.load import load, open_accounts
from tests.dashboard.prometheus import Prometheus, dashboard_panels, scraping
from tests.support import ROOT, volatile_redis

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
SLOTS = 4
"""Fewer than the LoRAs that are asked for, so that some are evicted."""
HOST_MEMORY = 6 * 2**20
"""For few adapters, so that some are read again."""
HEADING = "Atelier"
NOTE = (
    "configs/monitoring/dashboard.json, drawn by matplotlib from the answers of Prometheus to each panel's own queries; "
    "not a screenshot of Grafana. One CPU machine, one generator, one upscaler."
)


def record(site: Site, folder: Path, seconds: float) -> tuple[Drawn, float, dict[str, str]]:
    """Load the service; return each panel's series, when the load began, and the alerts."""
    broken = site.run(break_lora(site.resources, folder / "no such folder"))
    callers = site.run(open_accounts(site))
    loras = [lora.id for lora in site.run(site.resources.catalog.all()) if lora.id != broken.id]
    token_file = site.resources.settings.data_dir / "operator-token"
    with scraping(site.base_url, token_file, folder) as prometheus:
        begin = time.time()
        asyncio.run(load(site.base_url, callers, loras, broken, seconds))
        return series_of_panels(prometheus, begin, time.time()), begin, prometheus.rules()


def series_of_panels(prometheus: Prometheus, begin: float, end: float) -> Drawn:
    return {
        panel["id"]: [series for target in panel["targets"] for series in prometheus.series(target, begin, end)]
        for panel in dashboard_panels()
        if "targets" in panel
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--minutes", type=float, default=8.0, help="how long the service is loaded")
    words.add_argument("--out", type=Path, default=PICTURE)
    given = words.parse_args()
    with TemporaryDirectory() as folder, volatile_redis() as redis_url:
        settings = Settings(data_dir=Path(folder) / "var", redis_url=redis_url)
        options = EngineOptions(device="cpu", max_rows=16, adapter_slots=SLOTS, host_memory=HOST_MEMORY, exact=False)
        with open_site(settings, options) as site:
            drawn, begin, alerts = record(site, Path(folder), 60 * given.minutes)
    draw(dashboard_panels(), drawn, begin, HEADING, NOTE, given.out)
    _report(drawn, alerts, given.out)


def _report(drawn: Drawn, alerts: dict[str, str], out: Path) -> None:
    for panel in dashboard_panels():
        if "targets" in panel:
            shown = [series for series in drawn[panel["id"]] if any(series.values)]
            print(f"{panel['title']}: {len(drawn[panel['id']])} series, {len(shown)} of them above zero")  # noqa: T201
    print(*(f"{name}: {state}" for name, state in alerts.items()), out, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
