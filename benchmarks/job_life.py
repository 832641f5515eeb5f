"""What the life of one quiet job asks of Redis: commands, those inside scripts too, and the time of scripts.

    python -m benchmarks.job_life [--rounds 7] [--lives 50]

One life is an accept with its authentication, a claim and one that finds nothing, ten heartbeats, fifteen polls, two
sends of measures, the commit and a page of history, through the real application and queue. Redis writes no file. In
another checkout, run this file with its `PYTHONPATH`.
"""

import argparse
import asyncio
import secrets
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import redis

from benchmarks.servers import roomy_settings, spread
from serve_app.domain.jobs import HeartbeatReply, JobKind, StoredImage, Timings, new_image_id
from serve_app.domain.requests import Variant
from serve_app.jobs.queue import new_nonce
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from tests.composition import Resources, open_resources

HEARTBEATS, POLLS = 10, 15
SCRIPTS = ("evalsha", "eval")
RESIDENT = [secrets.token_hex(32) for _ in range(8)]


class Spent(NamedTuple):
    commands: int
    ms: float


def spent(server: Any) -> Spent:
    """Return what the server has counted since the last call."""
    rows = {name.removeprefix("cmdstat_"): row for name, row in server.info("commandstats").items()}
    server.config_resetstat()
    ms = sum(rows[name]["usec"] for name in SCRIPTS if name in rows) / 1000
    return Spent(sum(row["calls"] for name, row in rows.items() if name not in ("info", "config|resetstat")), ms)


async def life(resources: Resources, http: httpx.AsyncClient, lora_id: str) -> AsyncGenerator[str]:
    """Live a job's life, and tell the name of each step that is over."""
    claim: dict[str, Any] = {"pool": JobKind.GENERATION, "resident": RESIDENT, "limit": 8}
    body = {"prompt": "a lighthouse on a cliff at dusk, waves below", "lora_id": lora_id}
    accepted = await http.post("/v1/generate", headers={"Idempotency-Key": secrets.token_hex(8)}, json=body)
    job_id = accepted.raise_for_status().json()["request_id"]
    yield "accept"
    (claimed,) = await resources.queue.claim("worker", nonce=new_nonce(), **claim)
    yield "claim"
    assert not await resources.queue.claim("worker", nonce=new_nonce(), **claim)
    yield "claim of nothing"
    for number in range(POLLS):
        if number < HEARTBEATS:
            assert await resources.queue.heartbeat(claimed.lease, progress=9 * number) is HeartbeatReply.OK
            yield "heartbeats"
        if number == HEARTBEATS:
            uri = f"s3://pictures/images/{secrets.token_hex(16)}/2026/11/28/{job_id}/a1-0.png"
            names: dict[str, Any] = {"image_id": new_image_id(), "image_uri": uri, "sha256": secrets.token_hex(32)}
            image = StoredImage(**names, width=512, height=512, size_bytes=345_678)
            times = Timings(load=0.1, denoise=1.2, store=0.1)
            await resources.queue.finish(claimed.lease, [image], seconds=1.4, timings=times)
            yield "finish"
        polled = (await http.get(f"/v1/generate/{job_id}")).raise_for_status().json()
        assert polled["status"] == ("completed" if number >= HEARTBEATS else "processing"), polled
        yield "polls"
        if number % 5 == 4 and number < HEARTBEATS:
            await resources.measures.send()
            yield "measures"
    (await http.get("/v1/jobs", params={"limit": 1})).raise_for_status()
    yield "history"


async def _measure(folder: Path, rounds: int, lives: int) -> None:
    settings = roomy_settings(folder)
    server = cast(Any, redis.Redis.from_url(ensure_redis(settings.data_dir).url))
    server.config_set("appendonly", "no")
    lives_spent, steps = list[Spent](), defaultdict[str, int](int)
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("benchmark", plan_a="roomy")
        _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
        lora_id = (await resources.catalog.all())[0].id
        transport, headers = httpx.ASGITransport(resources.app()), {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://atelier", headers=headers) as http:
            for number in range(rounds + 1):
                steps.clear()
                async for step in life(resources, http, lora_id):
                    steps[step] += spent(server).commands
                for _ in range(lives):
                    async for _ in life(resources, http, lora_id):
                        pass
                    lives_spent.append(spent(server))
                if number == 0:
                    lives_spent.clear()  # the first life of all opens connections, and loads scripts
    print(", ".join(f"{name} {commands}" for name, commands in steps.items()))
    of_rounds = [lives_spent[start : start + lives] for start in range(0, rounds * lives, lives)]
    commands = [sum(each.commands for each in row) / lives for row in of_rounds]
    ms = [sorted(each.ms for each in row)[lives // 2] for row in of_rounds]
    print(f"a life: {spread(commands, 0)} commands, {spread(ms)} ms of scripts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lives", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(_measure(Path(folder), options.rounds, options.lives))
        finally:
            stop_redis(Path(folder) / "var")


if __name__ == "__main__":
    main()
