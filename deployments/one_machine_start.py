"""What `atelier up` starts on one machine, in order, in the process that it supervises."""

import asyncio
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from deployments.config import ServeConfig
from deployments.demo import Demo, demo_account, first_image
from deployments.output import Reporter, Stages
from deployments.runtime import Runtime, last_line
from deployments.supervisor import Child
from serve_app.api.parts import AccountParts, LoraParts
from serve_app.atomic_files import write_atomically
from serve_app.domain.errors import AtelierError
from serve_app.jobs.moderation import Moderation
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog_file import CatalogError
from serve_app.settings import Settings
from serve_app.store.embedded_redis import embedded_release
from serve_app.store.process import open_process

READY_LIMIT_S = 60.0
DEPLOYMENT_STAGES = {
    "housekeeper": "Housekeeper",
    "ingress": "HTTP interfaces",
    "upscaler": "Upscaler: models loaded",
    "generator": "Generator: base model loaded, warm",
}
"""What the start of each deployment is called on the screen."""


@dataclass(frozen=True, slots=True)
class Start:
    """What to start, and where."""

    settings: Settings
    service: ServeConfig
    host: str
    port: int
    ready_file: Path | None
    limit_s: float

    @property
    def base_url(self) -> str:
        return f"http://{_reachable(self.host)}:{self.port}"


def run_service(child: Child, runtime: Runtime, start: Start, reporter: Reporter) -> int:
    """Start everything and wait; returns the exit code. A signal raises `KeyboardInterrupt`."""
    settings = start.settings

    def ray_died(reason: str) -> None:
        reporter.error(f"{reason} (logs: {runtime.logs})")
        child.finish(1)

    try:
        reporter.info("Starting Atelier ...")
        with reporter.stages() as stages:
            redis = "Redis" if settings.redis_url else "Redis (embedded)"
            stages.begin(redis)
            demo, lora_id = asyncio.run(_prepare(settings, start.base_url, reporter))
            stages.end(redis, "" if settings.redis_url else embedded_release(settings.data_dir))
            with stages.stage("Ray"), child.uninterruptible():
                runtime.start(start.service, host=start.host, port=start.port, on_death=ray_died)
            _deploy(runtime, start, stages)
            with stages.stage("Readiness check"):
                _wait_until_ready(start.base_url)
            if start.ready_file is not None:
                write_atomically(start.ready_file, json.dumps(demo.ready) + "\n")
            reporter.ready(demo)
            if lora_id is not None:
                _first_image(settings, demo, lora_id, stages)
        reporter.welcome(demo, lora_id, data_dir=settings.data_dir, logs=runtime.logs)
        signal.pause()
        return 0
    except CatalogError as error:
        reporter.error(str(error))
        return 2
    except (AtelierError, RuntimeError, OSError) as error:
        reporter.error(f"{last_line(error)} (logs: {runtime.logs})")
        runtime.stop()
        return 1
    except KeyboardInterrupt:
        runtime.stop()
        raise


def _deploy(runtime: Runtime, start: Start, stages: Stages) -> None:
    """Start all deployments at once; each is a stage of its own."""
    for stage in DEPLOYMENT_STAGES.values():
        stages.begin(stage)
    runtime.deploy(start.service, on_healthy=lambda name: stages.end(DEPLOYMENT_STAGES[name]), limit_s=start.limit_s)


async def _prepare(settings: Settings, base_url: str, reporter: Reporter) -> tuple[Demo, str | None]:
    """Start the embedded Redis and apply the catalog; return the demo account and the first LoRA it may use, if any."""
    async with open_process(settings) as process:
        Moderation(settings)  # a mistake in its settings stops the start here, and not each replica
        accounts = AccountParts(process)
        loras = LoraParts(process, accounts)
        await loras.applied_catalog.apply_file_once()
        await _apply_catalog(loras.applied_catalog, reporter)
        demo = await demo_account(settings, accounts, base_url)
        account = await accounts.store.get(demo.account)
        adapters = await loras.catalog.adapters(account.id) if account else []
        return demo, adapters[0].id if adapters else None


async def _apply_catalog(catalog: AppliedCatalog, reporter: Reporter) -> None:
    """Apply the file as it is now; when it cannot be read, serve what was applied at an earlier start."""
    try:
        set_aside = [row.reason for row in await catalog.apply_file()]
    except CatalogError as error:
        set_aside = [f"{error}; serving what was applied before"]
    for reason in set_aside:
        reporter.error(f"catalog: {reason}")


def _wait_until_ready(base_url: str) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            answer = httpx.get(f"{base_url}/readyz", timeout=5)
            if answer.is_success and answer.json()["status"] == "ready":
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"{base_url}/readyz does not say that it is ready after {READY_LIMIT_S:g} s")
        time.sleep(0.1)


def _first_image(settings: Settings, demo: Demo, lora_id: str, stages: Stages) -> None:
    """Draw one image, once per data directory: it shows that everything works together."""
    path = settings.data_dir / "first-image.png"
    if path.exists():
        return
    stages.begin("First image")
    try:
        drawn = first_image(demo, lora_id, path, lambda percent: stages.update("First image", percent))
        note = str(path) if drawn else "failed: see the logs"
    except httpx.HTTPError as error:
        note = f"failed: {error}"
    stages.end("First image", note)


def _reachable(host: str) -> str:
    """An address that a browser can open, also for a wildcard host."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
