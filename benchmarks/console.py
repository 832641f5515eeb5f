"""Measures the server time of every page, and polls with and without a person in the console.

    .venv/bin/python -m benchmarks.console [--jobs 10000] [--loras 1000] [--rounds 30] [--turns 5] [--seconds 20]

One uvicorn process over one Redis. The records are made by the scripts that the service uses; the LoRAs are of one
account, which opens the pages. Server time: from the request to the last byte, one request at a time. Polls are closed
loops on a few connections, in turns without and with the console's load: one person, in a process of its own, who opens
page after page with the pictures on it, a second apart. Each turn's p99 with the person is set against that of the turn
before it without.
"""

import argparse
import asyncio
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from io import BytesIO
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import httpx
from PIL import Image

from benchmarks.http import Callers, cpu_seconds
from benchmarks.servers import SERVE, start_server
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
UNFINISHED = 8
PICTURES = 64
"""Stored images, which the jobs share: more than a page shows, so that each has its own."""
GOAL_MS, GOAL_RATIO = 100.0, 1.2
_PICTURE = re.compile(r'<img src="(/[^"]+)"')


class Visit(NamedTuple):
    """A page, and the cookies of who opens it."""

    path: str
    cookies: Mapping[str, str]


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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
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
            visits = [Visit(path, dict(browser.cookies)) for browser, path in opened]
        sys.stdout.write(f"slowest page: {max(times):.1f} ms (goal {GOAL_MS:g})\n")
        callers = Callers(port, [pid], filled.secret, "", POLLERS)
        callers.ids = filled.job_ids
        with _person(port, visits) as visits_now:
            await _compare_polls(callers, visits_now, options.turns, options.seconds)
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


async def _compare_polls(callers: Callers, visits_now: Event, turns: int, seconds: float) -> None:
    """Without, with, without, with."""
    ratios: list[float] = []
    for _ in range(turns):
        p99_ms: list[float] = []
        for name in ("without", "with"):
            if name == "with":
                visits_now.set()
            polls = await callers.poll(seconds)
            visits_now.clear()
            p99_ms.append(polls.p99_ms)
            sys.stdout.write(
                f"| polls, {name} | {polls.per_s:.0f} | {polls.p50_ms:.2f} | {polls.p99_ms:.2f} | {polls.cpu_ms:.2f} |\n"
            )
            sys.stdout.flush()
        ratios.append(p99_ms[1] / p99_ms[0])
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    sys.stdout.write(f"p99 with/without: median {statistics.median(ratios):.2f} of {shown} (goal {GOAL_RATIO:g})\n")


@contextmanager
def _person(port: int, visits: Sequence[Visit]) -> Generator[Event]:
    """A process that opens pages while the event is set. It ends with the block."""
    spawn = multiprocessing.get_context("spawn")
    visits_now, is_ready = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_open_pages, args=(port, visits, visits_now, is_ready), daemon=True)
    process.start()
    try:
        assert is_ready.wait(60)
        yield visits_now
        assert process.is_alive(), "an address of a page or of its pictures was refused"
    finally:
        process.terminate()
        process.join()


def _open_pages(port: int, visits: Sequence[Visit], visits_now: Event, is_ready: Event) -> None:
    """Open each page with its new pictures, as a browser caches them, and wait a second between pages."""
    known: set[str] = set()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as browser:
        is_ready.set()
        while True:
            for visit in visits:
                visits_now.wait()
                cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in visit.cookies.items())}
                page = browser.get(visit.path, headers=cookie)
                for picture in [each for each in _PICTURE.findall(page.text) if each not in known]:
                    browser.get(picture, headers=cookie).raise_for_status()
                    known.add(picture)
                time.sleep(1)


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
    uris = [await _store_picture(resources, account) for _ in range(PICTURES)]
    job_ids: list[str] = []
    for start in range(0, jobs, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, jobs))
        job_ids += [await _accept(resources, account, lora_ids[n % loras], n) for n in numbers]
        await _finish(resources, uris)
    for number in range(UNFINISHED):
        job_ids.append(await _accept(resources, account, lora_ids[number % loras], jobs + number))
    return Filled(
        secret,
        (
            await resources.sign_in_links.create(account.id, LinkPurpose.SIGN_IN),
            await resources.operator_links.create("alice", LinkPurpose.SIGN_IN),
        ),
        {"job": job_ids[jobs - 1], "lora": lora_ids[0], "account": account.id},
        job_ids[-64:],
    )


async def _register(resources: Resources, account: Account, number: int) -> str:
    lora_id = new_adapter_id()
    adapter = Adapter(
        id=lora_id, name=f"Style {number}", description="A style that was uploaded.", created_at=datetime.now(UTC),
        file=f"style-{number}.safetensors", sha256=f"{number:064x}", base_model="pocket", accounts=frozenset(), owner=account.id,
        size_bytes=1 << 20,
    )  # fmt: skip
    assert await resources.adapter_registry.register(adapter)
    return lora_id


async def _accept(resources: Resources, account: Account, lora_id: str, number: int) -> str:
    request = GenerationRequest(prompt=f"a lighthouse at night, {number}", lora_id=lora_id, seeds=(number,))
    job_id = new_job_id(JobKind.GENERATION)
    await resources.queue.accept(
        job_id=job_id, variant=Variant.A, account_id=account.id, request=request, adapter_id=lora_id, plan="enterprise"
    )
    return job_id


async def _finish(resources: Resources, uris: Sequence[str]) -> None:
    """End what waits."""
    claims = await resources.queue.claim("benchmark", kind=JobKind.GENERATION, nonce=new_nonce(), limit=AT_ONCE)
    for claim in claims:
        assert isinstance(claim.request, GenerationRequest)
        uri = uris[claim.request.seeds[0] % len(uris)]
        image = StoredImage(
            image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256="0" * 64, size_bytes=1
        )  # fmt: skip
        await resources.queue.finish(claim.lease, [image], seconds=0.5)


async def _store_picture(resources: Resources, account: Account) -> str:
    """The URI of a PNG of the size that the service makes, with something to decode in it."""
    png = BytesIO()
    Image.effect_noise((512, 512), 40).convert("RGB").save(png, "PNG")
    name = resources.images.object_name(account.id, new_job_id(JobKind.GENERATION), 1, 0, datetime.now(UTC))
    return await resources.images.put(name, png.getvalue())


if __name__ == "__main__":
    main()
