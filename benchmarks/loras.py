"""Compares the processor time that a thousand registered LoRAs cost with that of eight.

    .venv/bin/python -m benchmarks.loras [--many 1000] [--rounds 15] [--calls 50] [--starts 5]

Two services of their own, in turn, so that other load on the machine blurs both alike. In each, one account owns eight or a
thousand LoRAs, and another may use those of the bundled catalog. Counted is the processor time of the serving process with
its Redis: first through the stores in this process, then through HTTP to a uvicorn process with the real application.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import redis
import yaml

from benchmarks.http import cpu_seconds
from benchmarks.polls import SERVE, start_server
from serve_app.domain.accounts import Caller
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import JobKind
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service.resources import Resources, open_resources
from serve_app.service.submit import generate
from serve_app.settings import ROOT, Settings
from serve_app.stores.claiming import new_nonce
from serve_app.stores.embedded import stop_redis

FEW = PAGE = 8

Work = Callable[[], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A service with so many registered LoRAs, their owner, and another account with a key."""

    settings: Settings
    resources: Resources
    redis: redis.Redis
    caller: Caller
    other: Caller
    secret: str
    other_secret: str
    lora_id: str

    def redis_seconds(self) -> float:
        cpu = self.redis.info("cpu")
        return cpu["used_cpu_user"] + cpu["used_cpu_sys"]


Spent = defaultdict[str, dict[str, list[float]]]
"""Milliseconds of a call, by what was called and the name of the side."""


async def main(options: argparse.Namespace) -> None:
    spent: Spent = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="loras-") as folder:
        sides: dict[str, Side] = {}
        try:
            async with AsyncExitStack() as stack:
                for owned in (FEW, options.many):
                    sides[str(owned)] = await _open(stack, Path(folder), owned)
                await _measure_stores(sides, options, spent)
                await _measure_http(sides, options, spent)
            for _ in range(options.starts):
                for name, side in sides.items():
                    for what, milliseconds in (await _start(side)).items():
                        spent[what][name].append(milliseconds)
        finally:
            for side in sides.values():
                stop_redis(side.settings.data_dir)
    _print(f"load {'/'.join(f'{value:.1f}' for value in os.getloadavg())}, {options}\n")
    _report(spent)


async def _open(stack: AsyncExitStack, folder: Path, owned: int) -> Side:
    folder = folder / str(owned)
    folder.mkdir()
    plans = [{"interface": interface, "name": "roomy", "limit": 10**9, "window_s": 3600} for interface in ("a", "b")]
    (folder / "plans.yaml").write_text(yaml.safe_dump(plans))
    settings = Settings(
        data_dir=folder / "var", plans=folder / "plans.yaml", max_queued_per_account=10**6,
        catalog=ROOT / "configs" / "catalog.yaml", polls_per_second=10**9,
    )  # fmt: skip
    resources = await stack.enter_async_context(open_resources(settings))
    caller, secret = await _member(resources, "owner")
    other, other_secret = await _member(resources, "another")
    for number in range(owned):
        assert await resources.adapter_registry.register(_lora(number, caller.account_id))
    return Side(
        settings=settings,
        resources=resources,
        redis=redis.Redis.from_url(resources.redis_url, decode_responses=True),
        caller=caller,
        other=other,
        secret=secret,
        other_secret=other_secret,
        lora_id="model_0",
    )


async def _member(resources: Resources, name: str) -> tuple[Caller, str]:
    account = await resources.accounts.create(name, plan_a="roomy", plan_b="roomy")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    caller = (await resources.auth.authenticate(secret, Variant.A, counted=False)).caller
    assert caller is not None, "the key was made just now"
    return caller, secret


def _lora(number: int, owner: str) -> Adapter:
    return Adapter(
        id=f"model_{number}",
        name=f"Style {number}",
        description="A style that was uploaded.",
        created_at=datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=number),
        file=f"memory://{number}.safetensors",
        sha256=f"{number:064x}",
        base_model="pocket",
        accounts=frozenset(),
        owner=owner,
        size_bytes=1 << 20,
    )


async def _measure_stores(sides: Mapping[str, Side], options: argparse.Namespace, spent: Spent) -> None:
    works = {name: _stores_works(side) for name, side in sides.items()}
    meters = {name: lambda side=side: time.process_time() + side.redis_seconds() for name, side in sides.items()}
    await _in_turn(works, meters, options, spent)


async def _measure_http(sides: Mapping[str, Side], options: argparse.Namespace, spent: Spent) -> None:
    async with AsyncExitStack() as stack:
        works: dict[str, Mapping[str, Work]] = {}
        meters: dict[str, Callable[[], float]] = {}
        for name, side in sides.items():
            port, pid = stack.enter_context(start_server(SERVE, [str(ROOT)], side.settings))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60))
            works[name] = _http_works(side, client)
            meters[name] = lambda side=side, pid=pid: cpu_seconds(pid) + side.redis_seconds()
        await _in_turn(works, meters, options, spent)


async def _in_turn(
    works: Mapping[str, Mapping[str, Work]],
    meters: Mapping[str, Callable[[], float]],
    options: argparse.Namespace,
    spent: Spent,
) -> None:
    """Measures each thing on one side after the other, in every second round in the other order.

    A first round does not count.
    """
    for number in range(options.rounds + 1):
        names = list(works)[:: 1 if number % 2 else -1]
        for what in works[names[0]]:
            for name in names:
                began = meters[name]()
                for _ in range(options.calls):
                    await works[name][what]()
                if number:
                    spent[what][name].append(1000 * (meters[name]() - began) / options.calls)


def _stores_works(side: Side) -> Mapping[str, Work]:
    """In this order: what is accepted is claimed next."""
    resources, caller, other = side.resources, side.caller, side.other
    request = GenerationRequest(prompt="a boat", lora_id=side.lora_id, seeds=(7,))

    async def open_stores() -> None:
        async with open_resources(side.settings):
            pass

    async def claim() -> None:
        (claimed,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
        await resources.queue.finish(claimed.lease, [], seconds=1)

    return {
        "open the stores": open_stores,
        "apply the catalog file": resources.applied_catalog.apply_file,
        "owner's page": lambda: resources.catalog.newest(caller.account_id, limit=PAGE),
        "another account's page": lambda: resources.catalog.newest(other.account_id, limit=PAGE),
        "another account's whole list": lambda: resources.catalog.adapters(other.account_id),
        "grant": lambda: resources.adapter_grants.grant(side.lora_id, other.account_id),
        "accept": lambda: generate(resources, caller, request),
        "claim and finish": claim,
    }


def _http_works(side: Side, client: httpx.AsyncClient) -> Mapping[str, Work]:
    own, others = ({"X-API-Key": secret} for secret in (side.secret, side.other_secret))
    bearer = {"Authorization": f"Bearer {side.secret}"}

    async def call(method: str, path: str, headers: Mapping[str, str], **body: Any) -> None:
        (await client.request(method, path, headers=headers, **body)).raise_for_status()

    grant = {"account": side.other.account_id}
    job = {"prompt": "a boat", "lora_id": side.lora_id, "seed": 7}
    return {
        "HTTP: owner's page of `/v1/loras`": lambda: call("GET", f"/v1/loras?limit={PAGE}", own),
        "HTTP: another account's page": lambda: call("GET", f"/v1/loras?limit={PAGE}", others),
        "HTTP: another account's `/v1/models`": lambda: call("GET", "/v1/models", others),
        "HTTP: one LoRA": lambda: call("GET", f"/v1/loras/{side.lora_id}", own),
        "HTTP: grant": lambda: call("POST", f"/v1/loras/{side.lora_id}/grants", own, json=grant),
        "HTTP: accept": lambda: call("POST", "/v1/generate", bearer, json=job),
    }


async def _start(side: Side) -> Mapping[str, float]:
    """Starts Redis with its file, then a process until its first page; milliseconds of processor time."""
    stop_redis(side.settings.data_dir)
    began = time.process_time()
    async with open_resources(side.settings) as resources:
        stores = time.process_time() - began
        restarted = redis.Redis.from_url(resources.redis_url, decode_responses=True)
        cpu = restarted.info("cpu")
        with start_server(SERVE, [str(ROOT)], side.settings) as (port, pid):
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": side.secret}
            ) as client:
                (await client.get(f"/v1/loras?limit={PAGE}")).raise_for_status()
            return {
                "start of Redis and the stores": 1000 * (stores + cpu["used_cpu_user"] + cpu["used_cpu_sys"]),
                "start of a process until its first page": 1000 * cpu_seconds(pid),
            }


def _report(spent: Spent) -> None:
    few, many = next(iter(spent.values()))
    _print(f"| processor time of a call, ms | {few} LoRAs | {many} LoRAs | ratio |\n|---|---|---|---|\n")
    for what, sides in spent.items():
        ratios = [more / less for less, more in zip(sides[few], sides[many], strict=True)]
        cells = [_spread(sides[few]), _spread(sides[many]), f"**{median(ratios):.2f}** {_range(ratios)}"]
        _print(f"| {what} | {' | '.join(cells)} |\n")


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} {_range(values)}"


def _range(values: Sequence[float]) -> str:
    return f"({min(values):.2f}–{max(values):.2f})"


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--starts", type=int, default=5)
    asyncio.run(main(parser.parse_args()))
