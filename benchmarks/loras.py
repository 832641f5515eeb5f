"""Compares a thousand registered LoRAs with eight: opening, listing, granting, accepting, claiming.

    python -m benchmarks.loras

Two services of their own are measured in turn, so that other load on the machine blurs both alike.
"""

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

from serve_app.domain.accounts import Caller
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import JobKind
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service.resources import Resources, open_resources
from serve_app.service.submit import generate
from serve_app.settings import Settings
from serve_app.stores.claiming import new_nonce
from serve_app.stores.embedded import stop_redis

LORA = Adapter(
    id="",
    name="Another's",
    description="",
    created_at=datetime(2026, 11, 1, tzinfo=UTC),
    file="memory://x.safetensors",
    sha256="1" * 64,
    base_model="pocket",
    accounts=frozenset(),
    owner="acct_another",
)


class Side(NamedTuple):
    """A service, one of its accounts, and an account that is granted things."""

    settings: Settings
    resources: Resources
    caller: Caller
    lora_id: str


async def main(many: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="atelier-loras-") as folder:
        async with AsyncExitStack() as stack:
            sides = {
                "8": await _open(stack, Path(folder) / "few", registered=0),
                str(8 + many): await _open(stack, Path(folder) / "many", registered=many),
            }
            times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
            for _ in range(rounds):
                for name, side in sides.items():
                    for what, work in _works(side).items():
                        began = time.perf_counter()
                        await work()
                        times[what, name].append(time.perf_counter() - began)
        for side in sides.values():
            stop_redis(side.settings.data_dir)
    few, more = sides
    print(f"| median of {rounds} | {few} LoRAs, ms | {more} LoRAs, ms | ratio |\n|---|---|---|---|")
    for what in dict.fromkeys(what for what, _ in times):
        first, second = (1000 * median(times[what, name]) for name in (few, more))
        print(f"| {what} | {first:.2f} | {second:.2f} | {second / first:.2f} |")


async def _open(stack: AsyncExitStack, folder: Path, *, registered: int) -> Side:
    """A service with the bundled catalog, and `registered` LoRAs of an account that nobody asks about."""
    settings = Settings(data_dir=folder)
    resources = await stack.enter_async_context(open_resources(settings))
    for number in range(registered):
        await resources.catalog.register(replace(LORA, id=f"model_{number}", sha256=f"{number:064x}"))
    account = await resources.accounts.create("acme", plan_a="enterprise", plan_b="premium")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    caller = (await resources.auth.authenticate(secret, Variant.A, counted=False)).caller
    assert caller is not None, "the key was made just now"
    return Side(settings, resources, caller, (await resources.catalog.adapters(account.id))[0].id)


def _works(side: Side) -> dict[str, Callable[[], Awaitable[object]]]:
    """What is measured, in this order: what is accepted is claimed next."""
    resources, caller = side.resources, side.caller
    request = GenerationRequest(prompt="a boat", lora_id=side.lora_id, seeds=(7,))

    async def start() -> None:
        async with open_resources(side.settings):
            pass

    async def claim() -> None:
        (claimed,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
        await resources.queue.finish(claimed.lease, [], seconds=1)

    return {
        "open the stores": start,
        "apply the catalog file": resources.catalog.apply_file,
        "list of an account": lambda: resources.catalog.adapters(caller.account_id),
        "grant": lambda: resources.catalog.grant(side.lora_id, caller.account_id),
        "accept": lambda: generate(resources, caller, request),
        "claim and finish": claim,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.many, arguments.rounds))
