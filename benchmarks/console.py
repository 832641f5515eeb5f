"""Server time of every page with many jobs and LoRAs, and the API's polls without and with people in the console, in one run.

    .venv/bin/python -m benchmarks.console [--jobs 10000] [--loras 1000] [--rounds 30] [--seconds 5]

One uvicorn process over one Redis. The records are made by the scripts that the service uses; the LoRAs are of one account,
which opens the pages. Server time: from the request to the last byte, one request at a time. Polls are closed loops on a few
connections; the console's load is one person who opens page after page, a second apart.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.http import Callers, cpu_seconds
from benchmarks.polls import SERVE, start_server
from serve_app.domain.accounts import Account
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import JobKind, StoredImage, new_adapter_id, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service.resources import Resources, open_resources
from serve_app.settings import ROOT, Settings
from serve_app.stores.claiming import new_nonce
from serve_app.stores.embedded import stop_redis
from serve_app.stores.sign_in_links import LinkPurpose
from tests.browser import pages

ORIGIN = {"Sec-Fetch-Site": "same-origin"}
AT_ONCE = 32
POLLERS = 4


class Filled(NamedTuple):
    """What the pages are opened with."""

    secret: str
    links: tuple[str, str]
    values: Mapping[str, str]
    job_ids: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--loras", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="console-") as folder:
        settings = Settings(
            data_dir=Path(folder) / "var", polls_per_second=10**9, catalog=ROOT / "configs/catalog.yaml"
        )
        try:
            asyncio.run(_measure(settings, options))
        finally:
            stop_redis(settings.data_dir)


async def _measure(settings: Settings, options: argparse.Namespace) -> None:
    async with open_resources(settings) as resources:
        filled = await _fill(resources, options.jobs, options.loras)
    with start_server(SERVE, [str(ROOT)], settings) as (port, pid):
        async with (
            _browser(port, "console", filled.links[0]) as person,
            _browser(port, "operators", filled.links[1]) as operator,
        ):
            opened = [(person, f"/console/{path}") for path in _paths(pages.CONSOLE, filled.values)]
            opened += [(operator, f"/operators/{path}") for path in _paths(pages.OPERATORS, filled.values)]
            for browser, path in opened:
                await _report(browser, path, pid, options.rounds)
            callers = Callers(port, pid, filled.secret, "", POLLERS)
            callers.ids = filled.job_ids
            await _compare_polls(callers, opened, options.seconds)
    sys.stdout.write(f"load {os.getloadavg()}, {options}\n")


async def _report(browser: httpx.AsyncClient, path: str, pid: int, rounds: int) -> None:
    answer = await browser.get(path)
    assert answer.status_code in (200, 404), (path, answer.status_code)
    times: list[float] = []
    cpu = cpu_seconds(pid)
    for _ in range(rounds):
        began = time.perf_counter()
        await browser.get(path)
        times.append(1000 * (time.perf_counter() - began))
    cpu_ms = 1000 * (cpu_seconds(pid) - cpu) / rounds
    p95 = statistics.quantiles(times, n=20)[18]
    shown = "/".join(part if "_" not in part else "…" for part in path.split("/"))
    size = len(answer.content) / 1024
    sys.stdout.write(f"| `{shown}` | {statistics.median(times):.1f} | {p95:.1f} | {cpu_ms:.1f} | {size:.0f} |\n")
    sys.stdout.flush()


async def _compare_polls(callers: Callers, opened: list[tuple[httpx.AsyncClient, str]], seconds: float) -> None:
    """Without, with, without, with."""
    for _ in range(3):
        for name in ("without", "with"):
            visit = asyncio.create_task(_visit(opened)) if name == "with" else None
            polls = await callers.poll(seconds)
            if visit is not None:
                visit.cancel()
                with suppress(asyncio.CancelledError):
                    await visit
            sys.stdout.write(
                f"| polls, {name} | {polls.per_s:.0f} | {polls.p50_ms:.2f} | {polls.p99_ms:.2f} | {polls.cpu_ms:.2f} |\n"
            )


async def _visit(opened: list[tuple[httpx.AsyncClient, str]]) -> None:
    while True:
        for browser, path in opened:
            await browser.get(path)
            await asyncio.sleep(1)


@asynccontextmanager
async def _browser(port: int, root: str, token: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Signed in by a link."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=ORIGIN, timeout=60) as browser:
        page = await browser.get(f"/{root}/links/{token}")
        form_token = page.text.split('name="form_token" value="')[1].split('"')[0]
        signed_in = await browser.post(f"/{root}/links/{token}", data={"form_token": form_token})
        assert signed_in.status_code == 303, signed_in.text
        yield browser


def _paths(states: Mapping[str, tuple[str, ...]], values: Mapping[str, str]) -> list[str]:
    found = [address.format(**values) for addresses in states.values() for address in addresses]
    return [each for each in found if each != "nothing-here"]


async def _fill(resources: Resources, jobs: int, loras: int) -> Filled:
    account = await resources.accounts.create("benchmark", plan_a="enterprise")
    await resources.operators.create("alice")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}), name="program")
    lora_ids = [await _register(resources, account, number) for number in range(loras)]
    job_ids: list[str] = []
    for start in range(0, jobs, AT_ONCE):
        job_ids += [
            await _accept(resources, account, lora_ids[n % loras], n) for n in range(start, min(start + AT_ONCE, jobs))
        ]
        if start + AT_ONCE < jobs:
            await _finish(resources, account)
    return Filled(
        secret,
        (
            await resources.sign_in_links.create(account.id, LinkPurpose.SIGN_IN),
            await resources.operator_links.create("alice", LinkPurpose.SIGN_IN),
        ),
        {"job": job_ids[0], "lora": lora_ids[0], "account": account.id},
        job_ids[-64:],
    )


async def _register(resources: Resources, account: Account, number: int) -> str:
    lora_id = new_adapter_id()
    adapter = Adapter(
        id=lora_id, name=f"Style {number}", description="A style that was uploaded.", created_at=datetime.now(UTC),
        file=f"style-{number}.safetensors", sha256=f"{number:064x}", base_model="pocket", accounts=frozenset(), owner=account.id,
        size_bytes=1 << 20,
    )  # fmt: skip
    assert await resources.catalog.register(adapter)
    return lora_id


async def _accept(resources: Resources, account: Account, lora_id: str, number: int) -> str:
    request = GenerationRequest(prompt=f"a lighthouse at night, {number}", lora_id=lora_id, seeds=(number,))
    job_id = new_job_id(JobKind.GENERATION)
    await resources.queue.accept(
        job_id=job_id, variant=Variant.A, account_id=account.id, request=request, adapter_id=lora_id, plan="enterprise"
    )
    return job_id


async def _finish(resources: Resources, account: Account) -> None:
    """End what waits; the images are names only."""
    claims = await resources.queue.claim("benchmark", kind=JobKind.GENERATION, nonce=new_nonce(), limit=AT_ONCE)
    for claim in claims:
        lease = claim.lease
        name = resources.images.object_name(account.id, lease.job_id, lease.attempt, 0, datetime.now(UTC))
        image = StoredImage(
            image_id=new_image_id(), image_uri=resources.images.uri(name), width=512, height=512, sha256="0" * 64, size_bytes=1
        )  # fmt: skip
        await resources.queue.finish(lease, [image], seconds=0.5)


if __name__ == "__main__":
    main()
