"""Measures the server time of every page, from the request to the last byte, one request at a time.

    .venv/bin/python -m benchmarks.console [--jobs 10000] [--loras 1000] [--rounds 30]

One uvicorn process over one Redis. The records are made by the scripts that the service uses; the LoRAs are of one
account, which opens the pages.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import httpx
from PIL import Image

from benchmarks.http import cpu_seconds
from benchmarks.servers import SERVE, start_server
from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import JobKind, NewJob, StoredImage, new_adapter_id, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.jobs.queue import new_nonce
from serve_app.settings import ROOT, Settings
from serve_app.store.embedded_redis import stop_redis
from tests.browser import pages
from tests.composition import Resources, open_resources

ORIGIN = {"Sec-Fetch-Site": "same-origin"}
AT_ONCE = 32
UNFINISHED = 8
PICTURES = 64
"""Stored images, which the jobs share: more than a page shows, so that each has its own."""
GOAL_MS = 100.0


class Filled(NamedTuple):
    """What the pages are opened with."""

    links: tuple[str, str]
    values: Mapping[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--loras", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=30)
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
            times = [await _report(browser, path, pid, options.rounds) for browser, path in opened]
        sys.stdout.write(f"slowest page: {max(times):.1f} ms (goal {GOAL_MS:g})\n")
    sys.stdout.write(f"load {os.getloadavg()}, {options}\n")


async def _report(browser: httpx.AsyncClient, path: str, pid: int, rounds: int) -> float:
    """Returns the median, in milliseconds."""
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
    shown = "/".join(part if "_" not in part.partition("?")[0] else "…" for part in path.split("/"))
    size = len(answer.content) / 1024
    sys.stdout.write(f"| `{shown}` | {statistics.median(times):.1f} | {p95:.1f} | {cpu_ms:.1f} | {size:.0f} |\n")
    sys.stdout.flush()
    return statistics.median(times)


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
    await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}), name="program")
    lora_ids = [await _register(resources, account, number) for number in range(loras)]
    uris = [await _store_picture(resources, account) for _ in range(PICTURES)]
    job_ids: list[str] = []
    for start in range(0, jobs, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, jobs))
        job_ids += [await _accept(resources, account, lora_ids[n % loras], n) for n in numbers]
        await _finish(resources, uris)
    for number in range(UNFINISHED):
        await _accept(resources, account, lora_ids[number % loras], jobs + number)
    return Filled(
        (
            await resources.sign_in_links.create(account.id, LinkPurpose.SIGN_IN),
            await resources.operator_links.create("alice", LinkPurpose.SIGN_IN),
        ),
        {"job": job_ids[jobs - 1], "lora": lora_ids[0], "account": account.id},
    )


async def _register(resources: Resources, account: Account, number: int) -> str:
    lora_id = new_adapter_id()
    adapter = Adapter(
        id=lora_id, name=f"Style {number}", description="A style that was uploaded.", created_at=datetime.now(UTC),
        file=f"style-{number}.safetensors", sha256=f"{number:064x}", base_model="pocket", accounts=frozenset(),
        owner=account.id, size_bytes=1 << 20,
    )  # fmt: skip
    await resources.adapter_registry.register(adapter)
    return lora_id


async def _accept(resources: Resources, account: Account, lora_id: str, number: int) -> str:
    request = GenerationRequest(prompt=f"a lighthouse at night, {number}", loras=(LoraUse(lora_id),), seeds=(number,))
    job_id = new_job_id(JobKind.GENERATION)
    await resources.queue.accept(
        NewJob(
            job_id=job_id,
            variant=Variant.A,
            account_id=account.id,
            request=request,
            loras=request.loras,
            plan="enterprise",
        )
    )
    return job_id


async def _finish(resources: Resources, uris: Sequence[str]) -> None:
    """End what waits."""
    claims = await resources.queue.claim("benchmark", pool=JobKind.GENERATION, nonce=new_nonce(), limit=AT_ONCE)
    for claim in claims:
        assert isinstance(claim.request, GenerationRequest)
        uri = uris[claim.request.seeds[0] % len(uris)]
        image = StoredImage(
            image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256="0" * 64, size_bytes=1
        )  # fmt: skip
        await resources.queue.finish(claim.lease, [image], seconds=0.5)


async def _store_picture(resources: Resources, account: Account) -> str:
    """Return the URI of a PNG of the size that the service makes, with something to decode in it."""
    png = BytesIO()
    Image.effect_noise((512, 512), 40).convert("RGB").save(png, "PNG")
    name = resources.images.object_name(account.id, new_job_id(JobKind.GENERATION), 1, 0, datetime.now(UTC))
    return await resources.images.put(name, png.getvalue())


if __name__ == "__main__":
    main()
