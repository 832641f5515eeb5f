"""Loads a running service: accounts, LoRAs, upscales, jobs that fail, refused requests."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import httpx

from serve_app.domain.requests import Variant
from tests.browser.broken_lora import BrokenLora
from tests.browser.site import Site

PROMPTS = (
    "a yellow flower with a red middle on a blue background",
    "purple mountains under a black sky with a yellow moon",
    "a red boat with a white sail on blue water under a yellow sky",
    "a large red heart in the center on a pink background",
)
POLL_S = 1.0
BETWEEN_BURSTS_S, BURST = 90.0, 4
UPSCALED, FAILING, REFUSED = 2, 4, 5
"""Every so many requests of a client."""
UNFINISHED = ("queued", "processing")


class Caller(NamedTuple):
    """An account's key, the interface it calls, and how many of its clients wait for their images."""

    interface: str
    key: str
    clients: int

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.interface == "a" else {"X-API-Key": self.key}


async def open_accounts(site: Site) -> list[Caller]:
    """Make accounts of all plans; the smallest soon exceeds its own."""
    callers: list[Caller] = []
    for name, plan_a, plan_b, clients in (
        ("acme", "professional", "premium", 3),
        ("north wind studio", "enterprise", "basic", 2),
        ("zeta", "basic", "free", 1),
    ):
        accounts = site.resources.accounts
        account = await accounts.get(name) or await accounts.create(name, plan_a=plan_a, plan_b=plan_b)
        await accounts.set_plans(account.id, plan_a=plan_a, plan_b=plan_b)
        _, key = await site.resources.api_keys.create(account.id, interfaces=frozenset(Variant))
        callers += [Caller("a", key, clients), Caller("b", key, 1)]
    return callers


async def load(
    base_url: str, callers: Sequence[Caller], loras: Sequence[str], broken: BrokenLora, seconds: float
) -> None:
    """Ask for images for so many seconds: clients that wait for theirs, and bursts that do not."""
    async with httpx.AsyncClient(base_url=base_url, timeout=30) as http:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for number, caller in enumerate(callers):
                    for client in range(caller.clients):
                        draw = random.Random(10 * number + client)
                        tasks.create_task(_client(http, caller, loras, broken.id, draw))
                    tasks.create_task(_bursts(http, caller, loras, random.Random(number)))


async def _client(
    http: httpx.AsyncClient, caller: Caller, loras: Sequence[str], broken: str, draw: random.Random
) -> None:
    """Ask for one image after another, and look at each until it is there."""
    for number in count(1):
        lora = broken if number % FAILING == 1 and caller.interface == "a" else _favourite(loras, draw)
        images = await _ask(http, caller, lora, draw)
        if images and caller.interface == "a" and number % UPSCALED == 0:
            answer = await http.post("/v1/upscale", json={"image_id": images[0]["image_id"]}, headers=caller.headers)
            if answer.is_success:
                await _wait(http, caller, answer.headers["Location"])
        if number % REFUSED == 1:
            await http.post("/v1/generate", json={"prompt": ""}, headers=caller.headers)
            await http.get("/v1/jobs", headers={"Authorization": "Bearer of no account"})
        await asyncio.sleep(draw.uniform(0, 2))


async def _bursts(http: httpx.AsyncClient, caller: Caller, loras: Sequence[str], draw: random.Random) -> None:
    while True:
        await asyncio.sleep(draw.uniform(0.5, 1.5) * BETWEEN_BURSTS_S)
        for _ in range(BURST):
            await http.post("/v1/generate", json=_body(caller, _favourite(loras, draw), draw), headers=caller.headers)


async def _ask(http: httpx.AsyncClient, caller: Caller, lora: str, draw: random.Random) -> list[dict[str, Any]]:
    answer = await http.post("/v1/generate", json=_body(caller, lora, draw), headers=caller.headers)
    if not answer.is_success:
        await asyncio.sleep(10 * POLL_S)
        return []
    images = await _wait(http, caller, answer.headers["Location"])
    for image in images:
        await http.get(image["url"])
    return images


async def _wait(http: httpx.AsyncClient, caller: Caller, path: str) -> list[dict[str, Any]]:
    """Return the images of a job once it has ended; none of one that failed."""
    while True:
        record = (await http.get(path, headers=caller.headers)).json()
        if record.get("status") == "completed":
            return record.get("images") or [{"url": record["image_url"]}]
        if record.get("status") not in UNFINISHED:
            return []
        await asyncio.sleep(POLL_S)


def _body(caller: Caller, lora: str, draw: random.Random) -> dict[str, Any]:
    prompt, seed = draw.choice(PROMPTS), draw.randrange(1000)
    if caller.interface == "a":
        return {
            "prompt": prompt,
            "lora_id": lora,
            "seed": seed,
            "steps": 20,
            "width": 512,
            "height": 512,
        }
    return {"positive_prompt": prompt, "model_id": lora, "seed": seed, "width": 256, "height": 256}


def _favourite(loras: Sequence[str], draw: random.Random) -> str:
    """Return some LoRAs more often than others: the n-th is asked for 1/n times as often as the first."""
    return draw.choices(loras, [1 / rank for rank in range(1, len(loras) + 1)])[0]
