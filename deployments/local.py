"""The `atelier` command: the operator's commands, and `up`, which runs the whole service on this machine."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer

from deployments.cluster_commands import add_check, check_cluster
from deployments.config import GENERATOR, ConfigError, ServeConfig, read_config
from deployments.demo import Demo, demo_account, first_image
from deployments.mcp_server import main as serve_mcp
from deployments.output import Reporter, Stages
from deployments.runtime import Runtime, kill_all_of, last_line, processes_in, runtime_home
from deployments.start_checks import check_this_machine, config_for_this_machine, unserved_groups
from deployments.supervisor import Child, supervise
from serve_app.api.parts import AccountParts, LoraParts
from serve_app.atomic_files import PRIVATE_UMASK, make_folder, write_atomically
from serve_app.cli import app
from serve_app.cli.command import BadUsage, read_settings
from serve_app.cli.doctor import add_doctor
from serve_app.client import AtelierClientError
from serve_app.domain.errors import AtelierError, StoreUnavailable
from serve_app.domain.jobs import DEFAULT_GROUP, pool_of
from serve_app.jobs.images import ImageStore
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.workers import WorkerStatus
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog_file import CatalogError
from serve_app.operations.checks import cannot_listen
from serve_app.settings import Settings
from serve_app.store.embedded_redis import running_redis, stop_redis
from serve_app.store.process import open_process
from serve_app.store.redis_inspection import require_durable, require_usable

START_LIMIT_S = 900.0
"""All replicas may take this long to start: large models take minutes to load and to warm up."""
STOP_LIMIT_S = 11.0
"""Whatever has not stopped after this many seconds is killed: 15 s are promised."""
STOP_REDIS_S = 2.0
READY_LIMIT_S = 60.0
LEAST_SPACE_BYTES = 1 << 20
"""This is enough for an empty Redis and Ray's first logs."""
DEPLOYMENT_STAGES = {
    "housekeeper": "Housekeeper",
    "ingress": "HTTP interfaces",
    "upscaler": "Upscaler: models loaded",
    "generator": "Generator: base model loaded",
}
"""What the screen calls the start of each deployment; the generators of a further group add the group's name."""


class Start(NamedTuple):
    """What to start, and where."""

    settings: Settings
    service: ServeConfig
    host: str
    port: int
    ready_file: Path | None
    limit_s: float

    @property
    def base_url(self) -> str:
        """An address that a browser can open, also for a wildcard host."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


add_doctor(app, check_cluster)
add_check(app)


def main() -> None:
    app()


@app.command()
def mcp() -> None:
    """Serve an assistant by the Model Context Protocol on standard input and output."""
    serve_mcp()


@app.command()
def up(
    host: Annotated[str | None, typer.Option(help="Address to listen on [the config's, 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on [the config's, 8000]")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where accounts, jobs and images live [./var]")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Serve YAML [configs/one_gpu.yaml on a machine with a GPU, else configs/local.yaml]"),
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis of your own [the embedded one]")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="JSON written when requests are accepted")] = None,
    start_limit: Annotated[
        float, typer.Option(min=1, help="Seconds that the replicas may take to start")
    ] = START_LIMIT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print only that JSON, when requests are accepted")] = False,
) -> None:
    """Run the whole service in the foreground: Redis, Ray, interfaces, console. Ctrl-C stops it."""
    os.umask(PRIVATE_UMASK)  # everything that it starts inherits the mask
    config, found = (config, "") if config else config_for_this_machine()
    settings, service = _checked(config, data_dir, redis_url)
    if ready_file is not None and not ready_file.parent.is_dir():
        raise BadUsage(f"--ready-file {ready_file}: {ready_file.parent} is not a directory")
    ready_file = ready_file and ready_file.resolve()
    host = host or service.http_options.host
    port = port or service.http_options.port
    with only_one(settings.data_dir):
        if reason := cannot_listen(host, port):
            raise BadUsage(f"{host}:{port} {reason}: choose another with --host and --port")
        reporter = Reporter(as_json)
        if found:
            reporter.info(found)
        if lost := unserved_groups(service, settings):
            reporter.error(f"catalog: no generators of this file load {lost}: their jobs wait")
        start = Start(settings, service, host=host, port=port, ready_file=ready_file, limit_s=start_limit)
        code = _supervise(start, reporter)
        os._exit(code)  # everything is stopped: unloading libraries would only use up the promised 15 s


def _checked(config: Path, data_dir: Path | None, redis_url: str | None) -> tuple[Settings, ServeConfig]:
    """Check options and settings before anything starts. Raises `BadUsage` with one line."""
    settings = read_settings(data_dir=data_dir, redis_url=redis_url)
    # Replicas read their settings from here, and a relative path would mean another place to them.
    os.environ["ATELIER_REDIS_URL"] = settings.redis_url
    for name in ("data_dir", "catalog", "plans"):
        if (path := getattr(settings, name)) is not None:
            os.environ[f"ATELIER_{name.upper()}"] = str(path.resolve())
    settings = read_settings()
    try:
        service = read_config(config)
        check_this_machine(config, service, settings)
        ImageStore(settings)
        for place in (settings.data_dir, runtime_home(settings.data_dir)):
            _check_space(place)
    except ConfigError as error:
        raise BadUsage(str(error)) from None
    except (ValueError, ImportError) as error:  # fsspec does not know or cannot load the protocol
        raise BadUsage(f"ATELIER_STORAGE_URL: {error}") from None
    except PermissionError as error:
        raise BadUsage(str(error)) from None
    return settings, service


def _check_space(place: Path) -> None:
    """Write as many bytes as a start needs at least. Raises `BadUsage` with the reason where they cannot be."""
    probe = place / ".writable"
    try:
        make_folder(place)
        write_atomically(probe, bytes(LEAST_SPACE_BYTES))
        probe.unlink()
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "free some space" if is_full else "give it to this user, or choose another with --data-dir"
        raise BadUsage(f"{place} cannot be written ({error.strerror}): {cure}") from None


@contextmanager
def only_one(data_dir: Path) -> Generator[None]:
    """Lock the data directory for this service, and end what a killed one left running."""
    with (data_dir / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadUsage(f"{data_dir} is in use by another service: choose another with --data-dir") from None
        kill_all_of(runtime_home(data_dir))
        yield


def _supervise(start: Start, reporter: Reporter) -> int:
    """Run the service until a signal or its own end, and leave nothing. Returns the exit code."""
    runtime = Runtime(runtime_home(start.settings.data_dir))

    def run(child: Child) -> int:
        return _run_service(child, runtime, start, reporter)

    def clean_up(session: int) -> None:
        runtime.kill(session)
        _stop_redis(start.settings)

    code = supervise(run, clean_up=clean_up, on_stop=reporter.stopping, stop_limit_s=STOP_LIMIT_S)
    if code is None:
        reporter.error(f"the service ended unexpectedly{runtime.said}")
    reporter.info("Stopped. Accounts, keys, jobs and images are kept.")
    return 1 if code is None else code


def _stop_redis(settings: Settings) -> None:
    """Stop the embedded Redis, also one that a killed process was just starting: it does not answer yet."""
    deadline = time.monotonic() + STOP_REDIS_S
    while not settings.redis_url:
        stop_redis(settings.data_dir, timeout=STOP_REDIS_S)
        if not processes_in(settings.data_dir.resolve() / "redis") or time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _run_service(child: Child, runtime: Runtime, start: Start, reporter: Reporter) -> int:
    """Start everything and wait; returns the exit code. A signal raises `KeyboardInterrupt`."""
    settings = start.settings

    def ray_died(reason: str) -> None:
        reporter.error(f"{reason}{runtime.said}")
        child.finish(1)

    try:
        reporter.info("Starting Atelier ...")
        with reporter.stages() as stages:
            redis = "Redis" if settings.redis_url else "Redis (embedded)"
            stages.begin(redis)
            demo, lora_id = asyncio.run(_prepare(settings, start.base_url, reporter))
            server = None if settings.redis_url else running_redis(settings.data_dir)
            stages.end(redis, server.release if server else "")
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
        reporter.error(f"{last_line(error)}{runtime.said}")
        runtime.stop()
        return 1
    except KeyboardInterrupt:
        runtime.stop()
        raise


def _deploy(runtime: Runtime, start: Start, stages: Stages) -> None:
    """Start all deployments at once; each is a stage of its own."""
    named = {demand.deployment: _stage(demand.deployment) for demand in start.service.demands}
    for name in sorted(named, key=lambda name: [*DEPLOYMENT_STAGES].index(name.partition(".")[0])):
        stages.begin(named[name])
    running = set(named)

    def show(healthy: set[str]) -> None:
        progress = asyncio.run(_generator_progress(start.settings, named))
        for name in sorted(running & healthy):
            running.remove(name)
            stages.end(named[name], progress.get(name, ""))
        for name in sorted(running & progress.keys()):
            stages.update(named[name], progress[name])

    runtime.deploy(start.service, show, limit_s=start.limit_s)


def _stage(deployment: str) -> str:
    name, _, group = deployment.partition(".")
    return f"{DEPLOYMENT_STAGES[name]} ({group})" if group else DEPLOYMENT_STAGES[name]


async def _generator_progress(settings: Settings, deployments: Iterable[str]) -> Mapping[str, str]:
    """Return by deployment the progress of generators that start, where they report any."""
    told: dict[str, str] = {}
    with suppress(StoreUnavailable):
        async with open_process(settings) as process:
            for name, _, group in (each.partition(".") for each in deployments):
                if name == GENERATOR:
                    words = await WorkerStatus(process.redis).starting(pool_of(group or DEFAULT_GROUP))
                    told |= {f"{name}.{group}" if group else name: words} if words else {}
    return told


async def _prepare(settings: Settings, base_url: str, reporter: Reporter) -> tuple[Demo, str | None]:
    """Start the embedded Redis and apply the catalog; return the demo account and the first LoRA it may use, if any."""
    if settings.redis_url:
        await asyncio.to_thread(require_usable, settings.redis_url)
        await asyncio.to_thread(require_durable, settings.redis_url, may_lose_jobs=settings.redis_may_lose_jobs)
    async with open_process(settings) as process:
        Moderation(settings)  # a mistake in its settings stops the start here, and not each replica
        if settings.mark_images:
            from serve_app.marking.marker import usable_credentials  # here, so that commands start without Pillow

            await asyncio.to_thread(usable_credentials, settings)
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
        first_image(demo, lora_id, path, lambda percent: stages.update("First image", f"{percent} %"))
        note = str(path)
    except AtelierClientError as error:
        note = f"failed: {error}"
    stages.end("First image", note)
