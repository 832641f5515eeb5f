"""Servers in processes of their own, and settings whose limits no caller of a benchmark meets."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import yaml

from serve_app.domain.jobs import Lease, StoredImage, new_image_id
from serve_app.settings import ROOT, Settings
from tests.composition import Resources

SERVE = """
import json, socket, sys, uvicorn, uvloop
from serve_app.settings import Settings
from tests.composition import open_resources
async def serve():
    async with open_resources(Settings.model_validate(json.loads(sys.argv[2]))) as resources:
        config = uvicorn.Config(resources.app(), port=int(sys.argv[1]), log_level="warning", lifespan="off", access_log=False)
        await uvicorn.Server(config).serve()
uvloop.run(serve())
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
    """A server in a process of its own: its port and process."""
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


async def finish(resources: Resources, account_id: str, lease: Lease) -> None:
    """Complete a job with an image of which there is only a name."""
    name = resources.images.object_name(account_id, lease.job_id, lease.attempt, 0, datetime.now(UTC))
    uri = resources.images.uri(name)
    image = StoredImage(image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256="0" * 64, size_bytes=1)
    await resources.queue.finish(lease, [image], seconds=0.5)
