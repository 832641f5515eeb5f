"""What a request costs does not grow with the number of LoRAs: commands and bytes, counted by Redis."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from serve_app.domain.accounts import Caller
from serve_app.domain.requests import GenerationDraft, LoraUse, Variant
from tests.composition import Resources
from tests.made_jobs import caller_of, claim
from tests.support import adapter_id, lora_record

NEON = adapter_id("neon")
DRAFT = GenerationDraft(prompt="a boat", loras=(LoraUse(NEON),), seed=7, interface=Variant.A)
FEW, MANY = 8, 1_000
VARIES = 300
"""Bytes by which equal answers differ: times and sequence numbers grow longer, and so does what Redis tells of
itself."""


class Cost(NamedTuple):
    commands: int
    """The process sends commands, and scripts call them."""
    bytes_out: int


class Meter:
    """Reads what Redis counts from one call to the next."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def cost(self, work: Callable[[], Awaitable[object]]) -> Cost:
        await work()  # loads its script
        own = self._read()
        before = self._read()
        await work()
        after = self._read()
        return Cost(
            after.commands - before.commands - (before.commands - own.commands),
            after.bytes_out - before.bytes_out - (before.bytes_out - own.bytes_out),
        )

    def _read(self) -> Cost:
        commands = sum(row["calls"] for row in self._client.info("commandstats").values())
        return Cost(commands, self._client.info("stats")["total_net_output_bytes"])


@pytest.mark.slow
async def test_a_thousand_loras_cost_what_eight_do(resources: Resources, redis_db: Any) -> None:
    caller, owner = await caller_of(resources), await resources.accounts.create("owner")
    meter = Meter(redis_db)
    await _register(resources, owner.id, range(FEW))
    await resources.catalog.adapters(owner.id)
    few = await _costs(resources, meter, caller, owner.id)
    await _register(resources, owner.id, range(FEW, MANY))
    await resources.catalog.adapters(owner.id)
    many = await _costs(resources, meter, caller, owner.id)
    for name, cost in few.items():
        assert many[name].commands == cost.commands, name
        assert abs(many[name].bytes_out - cost.bytes_out) < VARIES, name


async def _register(resources: Resources, owner: str, numbers: range) -> None:
    """Half of them are the owner's, and half are open to everyone."""
    for number in numbers:
        facts: dict[str, Any] = {"owner": owner} if number % 2 else {"accounts": None}
        await resources.adapter_registry.register(lora_record(id=f"model_{number}", **facts))


async def _costs(resources: Resources, meter: Meter, caller: Caller, owner: str) -> dict[str, Cost]:
    """Measures each thing that callers and replicas do all the time; `owner` has registered the LoRAs."""

    async def claim_and_finish() -> None:
        (claimed,) = await claim(resources)
        assert await resources.catalog.adapter(NEON)
        await resources.queue.finish(claimed.lease, [], seconds=1)

    async def change_and_list() -> None:
        await resources.adapter_registry.remove("model_changing")
        await resources.adapter_registry.register(lora_record(id="model_changing", accounts=None))
        assert "model_changing" in [each.id for each in await resources.catalog.adapters(caller.account_id)]

    return {
        "grant": await meter.cost(lambda: resources.adapter_grants.grant(NEON, caller.account_id)),
        "change and list": await meter.cost(change_and_list),
        "accept": await meter.cost(lambda: resources.submission.submit(caller, DRAFT)),
        "claim and finish": await meter.cost(claim_and_finish),
        "list": await meter.cost(lambda: resources.catalog.adapters(caller.account_id)),
        "page of another account": await meter.cost(
            lambda: resources.catalog.newest(caller.account_id, limit=FEW // 4)
        ),
        "page of the owner": await meter.cost(lambda: resources.catalog.newest(owner, limit=FEW // 4)),
    }
