"""The `atelier` command: the operator's commands, and `up`, which runs the whole service on one machine."""

import asyncio
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import httpx
import typer

from deployments.config import ConfigError, ServeConfig, read_config
from deployments.demo import Demo, demo_account, first_image, write_private
from deployments.runtime import Runtime, cannot_listen, kill_all_of, runtime_home
from deployments.telling import Teller
from serve_app.cli import app
from serve_app.cli.desk import read_settings
from serve_app.cli.ending import BadUsage
from serve_app.domain.errors import AtelierError
from serve_app.service.resources import open_resources
from serve_app.settings import ROOT, Settings
from serve_app.stores.catalog import CatalogError
from serve_app.stores.embedded import stop_redis

READY_LIMIT_S = 60.0
STOP_LIMIT_S = 11.0
"""If stopping hangs, or the machine is busy, what is left is killed now: 15 s are promised."""
STOP_REDIS_S = 2.0


def main() -> None:
    """The console script."""
    app()


@app.command()
def up(
    host: Annotated[str | None, typer.Option(help="Address to listen on [the config's, 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on [the config's, 8000]")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where accounts, jobs and images live [./var]")] = None,
    config: Annotated[Path, typer.Option(help="Serve YAML")] = ROOT / "configs" / "local.yaml",
    redis_url: Annotated[str | None, typer.Option(help="A Redis of your own [the embedded one]")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="JSON written when requests are accepted")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only that JSON, when requests are accepted")] = False,
) -> None:
    """Run the whole service in the foreground: Redis, Ray, both interfaces, the console. Ctrl-C stops it all."""
    settings, service = _checked(config, data_dir, redis_url)
    if ready_file is not None and not ready_file.parent.is_dir():
        raise BadUsage(f"--ready-file {ready_file}: {ready_file.parent} is not a directory")
    host = host or service.http_options.host
    port = port or service.http_options.port
    with only_one(settings.data_dir):
        if reason := cannot_listen(host, port):
            raise BadUsage(f"{host}:{port} {reason}: choose another with --host and --port")
        code = _run(settings, service, Teller(as_json), host=host, port=port, ready_file=ready_file)
        os._exit(code)  # all is stopped and said: unloading libraries would only use up the promised 15 s


def _checked(config: Path, data_dir: Path | None, redis_url: str | None) -> tuple[Settings, ServeConfig]:
    """Everything an operator can get wrong, refused in one line before anything starts. Raises `BadUsage`."""
    settings = read_settings(data_dir=data_dir, redis_url=redis_url)
    # replicas read the environment, and have other working directories
    os.environ["ATELIER_DATA_DIR"] = str(settings.data_dir.resolve())
    os.environ["ATELIER_REDIS_URL"] = settings.redis_url
    settings = read_settings()
    try:
        service = read_config(config)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        write_private(settings.data_dir / ".writable", "")
        runtime_home(settings.data_dir)
    except ConfigError as error:
        raise BadUsage(str(error)) from None
    except OSError as error:
        raise BadUsage(f"{error.filename or data_dir}: {error.strerror}") from None
    if not settings.catalog.is_file():
        raise BadUsage(f"setting catalog: {settings.catalog} is not a file")
    return settings, service


@contextmanager
def only_one(data_dir: Path) -> Generator[None]:
    """One service per data directory, and nothing left of one that was killed."""
    with (data_dir / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadUsage(f"{data_dir} is in use by another service: choose another with --data-dir") from None
        kill_all_of(runtime_home(data_dir))
        yield


def _run(
    settings: Settings, service: ServeConfig, teller: Teller, *, host: str, port: int, ready_file: Path | None
) -> int:
    """Until a signal; the exit code."""
    runtime = Runtime(runtime_home(settings.data_dir))
    base_url = f"http://{_reachable(host)}:{port}"
    code = 1
    try:
        _stop_on_signals()
        teller.say("Starting Redis, Ray and the engine ...")
        demo, lora_id = asyncio.run(_prepare(settings, base_url))
        runtime.start(service, host=host, port=port)
        _stop_on_signals()  # Ray has put its own handler in place
        _wait_until_ready(base_url)
        if ready_file is not None:
            write_private(ready_file, json.dumps(demo.ready) + "\n")
        teller.ready(demo)
        if lora_id is not None:
            _first_image(settings, demo, lora_id, teller)
        teller.welcome(demo, lora_id, data_dir=settings.data_dir, logs=runtime.logs)
        signal.pause()
    except (KeyboardInterrupt, SystemExit):
        code = 0
        teller.say("Stopping ...")
    except CatalogError as error:
        code = 2
        teller.complain(str(error))
    except (AtelierError, RuntimeError) as error:
        teller.complain(f"{str(error).strip().splitlines()[-1]} (logs: {runtime.logs})")
    finally:
        _stop(settings, runtime, teller, code)
    return code


async def _prepare(settings: Settings, base_url: str) -> tuple[Demo, str | None]:
    """The demo account, and a LoRA that it may use, if the catalog holds one. Starts the embedded Redis."""
    async with open_resources(settings) as resources:
        demo = await demo_account(resources, base_url)
        account = await resources.accounts.account(demo.account)
        adapters = await resources.catalog.adapters(account.id) if account else []
        return demo, adapters[0].id if adapters else None


def _stop(settings: Settings, runtime: Runtime, teller: Teller, code: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    deadline = threading.Timer(STOP_LIMIT_S, _kill, [settings, runtime, teller, code])
    deadline.daemon = True
    deadline.start()
    runtime.stop()
    _stop_redis(settings)
    deadline.cancel()
    teller.say("Stopped. Everything is kept.")


def _kill(settings: Settings, runtime: Runtime, teller: Teller, code: int) -> None:
    """Nothing is lost: Redis has all it confirmed on disk, and the jobs of killed replicas go back when their leases end."""
    runtime.kill()
    _stop_redis(settings)
    teller.say("Stopped, the last of it by force. Everything is kept.")
    os._exit(code)


def _stop_redis(settings: Settings) -> None:
    if not settings.redis_url:
        stop_redis(settings.data_dir, timeout=STOP_REDIS_S)


def _stop_on_signals() -> None:
    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def _wait_until_ready(base_url: str) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            if httpx.get(f"{base_url}/readyz", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"{base_url}/readyz does not answer after {READY_LIMIT_S:g} s")
        time.sleep(0.1)


def _first_image(settings: Settings, demo: Demo, lora_id: str, teller: Teller) -> None:
    """Once per data directory: proof that the whole path works."""
    path = settings.data_dir / "first-image.png"
    if path.exists():
        return
    began = time.monotonic()
    try:
        made = first_image(demo, lora_id, path, teller.drawing())
    except httpx.HTTPError as error:
        made, reason = False, str(error)
    else:
        reason = "see the logs"
    took = time.monotonic() - began
    teller.say(f"\rFirst image: {path} ({took:.1f} s)" if made else f"\rThe first image could not be made: {reason}")


def _reachable(host: str) -> str:
    """An address to open: a wildcard is not one."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
