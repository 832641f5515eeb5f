"""Servers in processes of their own, and settings whose limits no caller of a benchmark meets."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from serve_app.settings import ROOT, Settings

SERVE = """
import json, socket, sys, uvicorn, uvloop
from serve_app.http_server import freeze_startup_objects
from serve_app.settings import Settings
from tests.composition import open_resources
async def serve():
    async with open_resources(Settings.model_validate(json.loads(sys.argv[2]))) as resources:
        quiet = {"log_level": "warning", "lifespan": "off", "access_log": False}
        config = uvicorn.Config(resources.app(), port=int(sys.argv[1]), **quiet)
        freeze_startup_objects()
        await uvicorn.Server(config).serve()
uvloop.run(serve())  # as in a Ray actor; asyncio's own loop leaves Nagle's algorithm on here: 44 ms a poll
"""


def roomy_settings(folder: Path) -> Settings:
    """Limits that no caller of a benchmark meets."""
    plans = folder / "plans.yaml"
    plans.write_text(yaml.safe_dump([{"interface": "a", "name": "roomy", "limit": 10**9, "window_s": 3600}]))
    return Settings(
        data_dir=folder / "var",
        plans=plans,
        max_queued=10**7,
        max_queued_per_account=10**7,
        polls_per_second=10**9,
        lora_samples=False,
        catalog=ROOT / "configs" / "catalog.yaml",
    )


@contextmanager
def start_server(code: str, paths: list[str], settings: Settings) -> Generator[tuple[int, int]]:
    """Start a server in a process of its own; yield its port and process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fields = {name: str(getattr(settings, name)) for name in settings.model_fields_set}
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, str(port), json.dumps(fields)]
    process = subprocess.Popen(command, env=env, cwd=paths[-1] if paths else None)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, with (lowest–highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"
