"""The `atelier` command: the operator's commands, and `up`, which runs the whole service on one machine."""

import asyncio
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import httpx
import typer
import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from deployments.config import ConfigError, ServeConfig, first_mistake, read_config
from deployments.demo import Demo, demo_account, first_image, write_private
from deployments.runtime import Runtime, cannot_listen, kill_all_of, runtime_home
from serve_app.cli import app
from serve_app.cli.local import READY_FILE
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
    ready_file: Annotated[Path | None, typer.Option(help="JSON written when requests are accepted")] = None,
) -> None:
    """Run the whole service in the foreground: Redis, Ray, both interfaces, the console. Ctrl-C stops it all."""
    settings, service = _checked(config, data_dir)
    if ready_file is not None and not ready_file.parent.is_dir():
        _refuse(f"--ready-file {ready_file}: {ready_file.parent} is not a directory")
    host = host or service.http_options.host
    port = port or service.http_options.port
    with only_one(settings.data_dir):
        if reason := cannot_listen(host, port):
            _refuse(f"{host}:{port} {reason}: choose another with --host and --port")
        code = _run(settings, service, host=host, port=port, ready_file=ready_file)
        os._exit(code)  # all is stopped and said: unloading libraries would only use up the promised 15 s


def _checked(config: Path, data_dir: Path | None) -> tuple[Settings, ServeConfig]:
    """Everything an operator can get wrong, refused in one line before anything starts."""
    if data_dir is not None:
        os.environ["ATELIER_DATA_DIR"] = str(data_dir)
    try:
        settings = Settings()
        os.environ["ATELIER_DATA_DIR"] = str(settings.data_dir.resolve())  # replicas have other working directories
        settings = Settings()
        service = read_config(config)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        write_private(settings.data_dir / ".writable", "")
        runtime_home(settings.data_dir)
        settings.plan_table  # noqa: B018 - reads the plans file, if one is set
        if not settings.catalog.is_file():
            _refuse(f"setting catalog: {settings.catalog} is not a file")
    except ValidationError as error:
        _refuse(f"setting {first_mistake(error)}")
    except (ConfigError, SettingsError) as error:
        _refuse(str(error))
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        _refuse(f"setting plans: {str(error).splitlines()[0]}")
    except OSError as error:
        _refuse(f"{error.filename or data_dir}: {error.strerror}")
    return settings, service


@contextmanager
def only_one(data_dir: Path) -> Generator[None]:
    """One service per data directory, and nothing left of one that was killed."""
    with (data_dir / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _refuse(f"{data_dir} is in use by another service: choose another with --data-dir")
        kill_all_of(runtime_home(data_dir))
        yield


def _run(settings: Settings, service: ServeConfig, *, host: str, port: int, ready_file: Path | None) -> int:
    """Until a signal; the exit code."""
    runtime = Runtime(runtime_home(settings.data_dir))
    base_url = f"http://{_reachable(host)}:{port}"
    code = 1
    try:
        _stop_on_signals()
        _say("Starting Redis, Ray and the engine ...")
        demo, lora_id = asyncio.run(_prepare(settings, base_url))
        runtime.start(service, host=host, port=port)
        _stop_on_signals()  # Ray has put its own handler in place
        _wait_until_ready(base_url)
        if ready_file is not None:
            write_private(ready_file, json.dumps(demo.ready) + "\n")
        if lora_id is not None:
            _first_image(settings, demo, lora_id)
        _say(_welcome(settings, runtime, demo, lora_id))
        signal.pause()
    except (KeyboardInterrupt, SystemExit):
        code = 0
        _say("Stopping ...")
    except CatalogError as error:
        code = 2
        _complain(str(error))
    except (AtelierError, RuntimeError) as error:
        _complain(f"{str(error).strip().splitlines()[-1]} (logs: {runtime.logs})")
    finally:
        _stop(settings, runtime, code)
    return code


async def _prepare(settings: Settings, base_url: str) -> tuple[Demo, str | None]:
    """The demo account, and a LoRA that it may use, if the catalog holds one. Starts the embedded Redis."""
    async with open_resources(settings) as resources:
        demo = await demo_account(resources, base_url)
        account = await resources.accounts.account(demo.account)
        adapters = await resources.catalog.adapters(account.id) if account else []
        return demo, adapters[0].id if adapters else None


def _stop(settings: Settings, runtime: Runtime, code: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    deadline = threading.Timer(STOP_LIMIT_S, _kill, [settings, runtime, code])
    deadline.daemon = True
    deadline.start()
    runtime.stop()
    _stop_redis(settings)
    deadline.cancel()
    _say("Stopped. Everything is kept.")


def _kill(settings: Settings, runtime: Runtime, code: int) -> None:
    """Nothing is lost: Redis has all it confirmed on disk, and the jobs of killed replicas go back when their leases end."""
    runtime.kill()
    _stop_redis(settings)
    _say("Stopped, the last of it by force. Everything is kept.")
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


def _first_image(settings: Settings, demo: Demo, lora_id: str) -> None:
    """Once per data directory: proof that the whole path works."""
    path = settings.data_dir / "first-image.png"
    if path.exists():
        return
    began = time.monotonic()
    try:
        made = first_image(demo, lora_id, path, _progress_line())
    except httpx.HTTPError as error:
        made, reason = False, str(error)
    else:
        reason = "see the logs"
    took = time.monotonic() - began
    _say(f"\rFirst image: {path} ({took:.1f} s)" if made else f"\rThe first image could not be made: {reason}")


def _progress_line() -> Callable[[int], None]:
    if sys.stdout.isatty():
        return lambda progress: print(f"\rDrawing a first image ... {progress:3d} %", end="", flush=True)
    _say("Drawing a first image ...")
    return lambda progress: None


def _welcome(settings: Settings, runtime: Runtime, demo: Demo, lora_id: str | None) -> str:
    base_url = demo.base_url
    examples = "The catalog holds no LoRA yet: add one, then generate." if lora_id is None else _examples(demo, lora_id)
    return f"""
Atelier is ready.

  Base address   {base_url}
  Key for A      {demo.keys["a"]}   (Authorization: Bearer)
  Key for B      {demo.keys["b"]}   (X-API-Key)
  Console        {demo.console_url}   (account {demo.account}, password {demo.console_password})
  Documentation  {base_url}/docs/a   {base_url}/docs/b
  Data           {settings.data_dir}   (keys in {READY_FILE}, readable by you only)
  Logs           {runtime.logs}

{examples}

Ctrl-C stops everything.
"""


def _examples(demo: Demo, lora_id: str) -> str:
    """A line for each interface that works when pasted."""
    generate = f"curl -s {demo.base_url}/v1/generate -H 'Content-Type: application/json'"
    a = {"prompt": "a red circle", "lora_id": lora_id}
    b = {"positive_prompt": "a red circle", "model_id": lora_id}
    return f"""Interface A, then poll {demo.base_url}/v1/generate/REQUEST_ID with the same key:
{generate} -H 'Authorization: Bearer {demo.keys["a"]}' -d '{json.dumps(a)}'

Interface B, then poll {demo.base_url}/v1/generations/RUN_ID with the same key:
{generate} -H 'X-API-Key: {demo.keys["b"]}' -d '{json.dumps(b)}'"""


def _reachable(host: str) -> str:
    """An address to open: a wildcard is not one."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _say(text: str) -> None:
    print(text, flush=True)


def _complain(reason: str) -> None:
    print(f"atelier: {reason}", file=sys.stderr, flush=True)


def _refuse(reason: str) -> NoReturn:
    _complain(reason)
    raise typer.Exit(2)
