"""Whatever is sent to either room, the answer is one of the contract's: never a 5xx, every refusal in the envelope."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis
from starlette.types import ASGIApp, Message

from serve_app.api.app import create_app
from serve_app.service.resources import Resources, open_resources
from tests.api.house import LORA, House, client_of, house_settings
from tests.audit import audit
from tests.faults.bodies import Hostile, hostile_requests

QUICK, SOAK = 2_000, int(os.environ.get("ATELIER_SOAK_REQUESTS", "110000"))
SEED = int(os.environ.get("ATELIER_SOAK_SEED", "20261121"))


@pytest.fixture
async def resources(tmp_path: Path) -> AsyncIterator[Resources]:
    settings = house_settings(tmp_path / "var", [], max_queued=1_000_000, max_queued_per_account=1_000_000)
    async with open_resources(settings) as opened:
        yield opened


async def _fuzz(resources: Resources, number: int) -> Counter[int]:
    """The statuses of so many answers, each checked."""
    app = create_app(resources)
    async with client_of(app) as client:
        member = await House(resources, client).member()
    statuses: Counter[int] = Counter()
    began = time.monotonic()
    for count, request in enumerate(islice(hostile_requests(SEED, key=member.key, lora_id=LORA), number), start=1):
        status, headers, body = await send(app, request)
        _check(request, status, headers, body)
        statuses[status] += 1
        if count % 10_000 == 0:
            sys.stdout.write(f"\r{count} of {number} in {time.monotonic() - began:.0f} s: {dict(statuses)}   ")
    with redis.Redis.from_url(resources.redis_url, decode_responses=True, socket_timeout=600) as plain:
        assert not audit(plain, max_attempts=resources.settings.max_attempts)
    return statuses


async def test_thousands_of_hostile_requests_meet_no_5xx(resources: Resources) -> None:
    statuses = await _fuzz(resources, QUICK)
    assert statuses[200] > 50, "some of them must be fine, or nothing is tested behind the door"
    assert statuses[202] > 50
    assert statuses.keys() >= {400, 401, 403, 404, 405, 413, 415}


@pytest.mark.soak
async def test_many_hostile_requests_meet_no_5xx(resources: Resources) -> None:
    statuses = await _fuzz(resources, SOAK)
    sys.stdout.write(f"\n{statuses.total()} requests: {dict(sorted(statuses.items()))}\n")
    assert statuses.total() == SOAK


async def send(app: ASGIApp, request: Hostile) -> tuple[int, Mapping[str, str], bytes]:
    """Through the application as a server would: what HTTP libraries refuse to send reaches it too."""
    parts: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": n < len(request.chunks)}
        for n, chunk in enumerate(request.chunks, start=1)
    ] or [{"type": "http.request", "body": b"", "more_body": False}]
    waiting = iter(parts)
    sent: list[Message] = []

    async def receive() -> Message:
        return next(waiting, {"type": "http.disconnect"})

    async def keep(message: Message) -> None:
        sent.append(message)

    await app(_scope(request), receive, keep)
    head = {name.decode().lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:])


def _scope(request: Hostile) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(errors="replace"),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": ("127.0.0.1", 1),
        "server": ("house.test", 80),
    }


def _check(request: Hostile, status: int, headers: Mapping[str, str], body: bytes) -> None:
    assert status < 500, f"{status} for {request}"
    assert headers["x-request-id"], request
    if request.method == "HEAD":
        return
    if status < 300:
        json.loads(body)
        return
    assert status >= 400, f"{status} for {request}"
    error = json.loads(body)
    assert headers["content-type"] == "application/json", request
    assert error.keys() == {"error"}, request
    assert error["error"].keys() == {"code", "message"}, request
    assert all(isinstance(value, str) and value for value in error["error"].values()), request
