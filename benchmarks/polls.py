"""Compares the processor time of a poll between two checkouts and an empty FastAPI application.

    git worktree add ../before COMMIT
    .venv/bin/python -m benchmarks.polls --against ../before [--rounds 9] [--seconds 2] [--connections 32]

They are measured in turn, in one run. Each is one uvicorn process on uvloop, over one Redis and the same jobs. Answers
are compared first: both checkouts must give the same record. `--without-hiredis` keeps the other checkout from using
it, which redis-py does wherever it is installed.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http import Callers
from serve_app.domain.accounts import Caller
from serve_app.domain.jobs import JobKind, Lease, StoredImage, new_image_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service import submit
from serve_app.service.resources import Resources, open_resources
from serve_app.settings import ROOT, Settings
from serve_app.stores.claiming import new_nonce
from serve_app.stores.embedded import stop_redis

JOBS = 64
CHANGES = ("estimated_completion_time",)

SERVE = """
import json, socket, sys, uvicorn, uvloop
from serve_app.api.app import create_app
from serve_app.service import submit
from serve_app.service.resources import open_resources
from serve_app.settings import Settings
async def serve():
    async with open_resources(Settings.model_validate(json.loads(sys.argv[2]))) as resources:
        config = uvicorn.Config(create_app(resources), port=int(sys.argv[1]), log_level="warning", lifespan="off", access_log=False)
        await uvicorn.Server(config).serve()
uvloop.run(serve())
"""
EMPTY = """
import sys, uvicorn
from fastapi import FastAPI
app = FastAPI(openapi_url=None)
@app.get("/v1/generate/{request_id}")
async def poll(request_id: str):
    return {"request_id": request_id, "status": "processing", "progress": 0, "estimated_completion_time": "2026-11-24T00:00:00Z"}
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", lifespan="off", access_log=False, loop="uvloop")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--without-hiredis", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polls-") as folder:
        settings = Settings(
            data_dir=Path(folder) / "var", polls_per_second=10**9, catalog=ROOT / "configs/catalog.yaml"
        )
        try:
            asyncio.run(_measure(settings, options, Path(folder)))
        finally:
            stop_redis(settings.data_dir)


async def _measure(settings: Settings, options: argparse.Namespace, folder: Path) -> None:
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("benchmark", plan_a="enterprise")
        _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
        jobs = {"waiting": await _accept(resources, account.id), "completed": await _complete(resources, account.id)}
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "hiredis.py").write_text("raise ImportError('left out of this measurement')\n")
    before = [str(blocked)] if options.without_hiredis else []
    with (
        start_server(SERVE, [*before, str(options.against.resolve())], settings) as old,
        start_server(SERVE, [str(ROOT)], settings) as new,
        start_server(EMPTY, [], settings) as empty,
    ):
        for job_id in (jobs["waiting"][0], jobs["completed"][0]):
            assert _record(old[0], job_id, secret) == _record(new[0], job_id, secret), "the answers differ"
        for state, ids in jobs.items():
            servers = {"before": old, "now": new} | ({"empty application": empty} if state == "waiting" else {})
            costs: dict[str, list[float]] = {name: [] for name in servers}
            for _ in range(options.rounds):
                for name, (port, pid) in servers.items():
                    callers = Callers(port, [pid], secret, "", options.connections)
                    callers.ids = ids
                    costs[name].append((await callers.poll(options.seconds)).cpu_ms)
            for name, each in costs.items():
                share = statistics.median(new / old for new, old in zip(each, costs["before"], strict=True))
                sys.stdout.write(
                    f"| {state} | {name} | {statistics.median(each):.2f} ({min(each):.2f}–{max(each):.2f}) | {share:.2f} |\n"
                )
    sys.stdout.write(f"load {os.getloadavg()}, {options}\n")


async def _accept(resources: Resources, account_id: str) -> list[str]:
    adapter = (await resources.catalog.all())[0]
    plan = resources.settings.plan_table[Variant.A, "enterprise"]
    caller = Caller(account_id=account_id, account_name="benchmark", key_id="key_x", variant=Variant.A, plan=plan)
    ids: list[str] = []
    for seed in range(JOBS):
        request = GenerationRequest(
            prompt=f"lighthouse {seed}", lora_id=adapter.id, lora_weight=0.75, width=512, height=512,
            guidance_scale=7.5, steps=30, seeds=(seed,),
        )  # fmt: skip
        acceptance = await submit.generate(resources, caller, request)
        ids.append(acceptance.job.id)
    return ids


async def _complete(resources: Resources, account_id: str) -> list[str]:
    """Of as many more jobs the records after their end; their images are names only."""
    await _accept(resources, account_id)
    claims = await resources.queue.claim("benchmark", kind=JobKind.GENERATION, nonce=new_nonce(), limit=JOBS)
    for claim in claims:
        await finish(resources, account_id, claim.lease)
    return [claim.lease.job_id for claim in claims]


async def finish(resources: Resources, account_id: str, lease: Lease) -> None:
    """Complete a job with an image of which there is only a name."""
    name = resources.images.object_name(account_id, lease.job_id, lease.attempt, 0, datetime.now(UTC))
    uri = resources.images.uri(name)
    image = StoredImage(image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256="0" * 64, size_bytes=1)
    await resources.queue.finish(lease, [image], seconds=0.5)


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


def _record(port: int, job_id: str, secret: str) -> dict[str, Any]:
    """The answer without what differs from call to call: the estimate, and the signatures of addresses."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/generate/{job_id}", headers={"Authorization": f"Bearer {secret}", "Host": "same"}
    )
    with urllib.request.urlopen(request) as answer:
        record = json.load(answer)
    kept = {name: value for name, value in record.items() if name not in CHANGES}
    for image in kept.get("images", []):
        image["url"] = urlsplit(image["url"]).path
    return kept


if __name__ == "__main__":
    main()
